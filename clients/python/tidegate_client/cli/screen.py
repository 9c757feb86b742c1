"""Where the command line writes: answers to stdout, everything else to stderr.

Owns the two consoles and how numbers of a generation are shown.
"""

from __future__ import annotations

from rich.console import Console

from tidegate_client.types import Finished

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def write_text(text: str) -> None:
    """Writes a piece of a model's text as it is, at once."""
    out.file.write(text)
    out.file.flush()


def usage_line(finished: Finished) -> str:
    """Returns the token counts of a candidate in one line."""
    usage = finished.usage
    line = (
        f"usage: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.output_tokens} output tokens, ended by {finished.reason}"
    )
    return line + (f", preempted {usage.preemptions} times" if usage.preemptions else "")


def timings_line(finished: Finished) -> str:
    """Returns where a candidate's time went in one line."""
    timings = finished.timings
    parts = [
        f"queue {milliseconds(timings.queue_s)}",
        f"prefill {milliseconds(timings.prefill_s)}",
        f"decode {milliseconds(timings.decode_s)}",
    ]
    if timings.preempted_s:
        parts.append(f"preempted {milliseconds(timings.preempted_s)}")
    parts.append(f"time to first token {milliseconds(timings.time_to_first_token_s)}")
    rate = decode_rate(finished)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    return "timings: " + ", ".join(parts)


def decode_rate(finished: Finished) -> float | None:
    """Returns tokens per second after the first one. None: there was only one."""
    later_tokens = finished.usage.output_tokens - 1
    return (
        later_tokens / finished.timings.decode_s
        if later_tokens > 0 and finished.timings.decode_s > 0
        else None
    )


def milliseconds(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds >= 100:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
