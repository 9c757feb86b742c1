"""Owns how a candidate's life is cut into the phases that traces show."""

from __future__ import annotations

from tidegate_telemetry import names


def phases(
    turns: list[tuple[str, float]], first_token_at: float | None, end: float
) -> list[tuple[str, float, float]]:
    """Phase, start and end of what a candidate went through, without gaps. Times are seconds of one clock.

    `turns` are the phases that it entered, with the time of each. All computing is called `prefill` there; it
    becomes `prefill` up to the first token and `decode` after it.
    """
    spans: list[tuple[str, float, float]] = []
    for (phase, start), (_, stop) in zip(turns, [*turns[1:], ("", end)], strict=True):
        if phase != names.SPAN_PREFILL or first_token_at is None or stop <= first_token_at:
            spans.append((phase, start, stop))
        elif start >= first_token_at:
            spans.append((names.SPAN_DECODE, start, stop))
        else:
            spans.append((names.SPAN_PREFILL, start, first_token_at))
            spans.append((names.SPAN_DECODE, first_token_at, stop))
    return spans
