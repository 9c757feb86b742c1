"""`tidegate trace`: where the time of one request went, drawn from what the scheduler remembers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.screen import Flow, milliseconds, out
from tidegate_client.waterfall import Phase, Waterfall, waterfall

STYLES = {"queue": "yellow", "prefill": "cyan", "decode": "green", "preempted": "red"}
_MOST_CHUNKS = 8
_LEAST_BAR = 20
_LEAST_WHERE = 12
_MOST_WHERE = 44
_GAP = 2  # characters between columns


def trace(
    request_id: Annotated[str, typer.Argument(help="Name of the request, live or ended lately.")],
    chunks: Annotated[bool, typer.Option("--chunks", help="Show every prefill chunk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Draw where the time of a request went: queue, prefill, decode, preempted. Needs no tracing backend."""
    with AdminClient(address) as admin:
        candidates = admin.explain(request_id)
    if as_json:
        out.print_json(json.dumps([_to_dict(each) for each in candidates]))
        return
    for candidate in candidates:
        out.print(picture(candidate, out.width, None if chunks else _MOST_CHUNKS))


def picture(candidate: pb.CandidateExplanation, width: int, most_chunks: int | None = None) -> Group:
    """A headline, the sums, the waterfall and what a waiting one waits for. `most_chunks` of each phase are
    drawn; None: all of them."""
    fall = waterfall(candidate)
    parts: list[RenderableType] = [_headline(candidate), _sums(fall)]
    parts += [Text(f"restored {fall.restored}")] if fall.restored else []
    parts += [Text(), _bars(fall, width, most_chunks)]
    parts += [Padding(Text(blocker.text), (0, 0, 0, 2)) for blocker in candidate.blockers]
    return Group(*parts)


def _to_dict(candidate: pb.CandidateExplanation) -> dict[str, object]:
    state = candidate.state
    names = {"request_id": state.request_id, "index": state.index, "finish_reason": candidate.finish_reason}
    return names | asdict(waterfall(candidate))


def _headline(candidate: pb.CandidateExplanation) -> Text:
    state = candidate.state
    status = pb.RequestStatus.Name(state.status).removeprefix("REQUEST_STATUS_").lower()
    name = f"{state.request_id}/{state.index}" if state.index else state.request_id
    end = f": {candidate.finish_reason}" if candidate.finish_reason else ""
    tokens = f"{state.prompt_tokens} prompt and {state.output_tokens} output tokens"
    return Text.assemble((name, "bold"), f"  {status}{end}, {tokens}, tenant {state.tenant}")


def _sums(fall: Waterfall) -> Flow:
    pieces = [Text.assemble("total ", (milliseconds(fall.total_s), "bold"))]
    if fall.first_token_s is not None:
        pieces.append(Text(f"time to first token {milliseconds(fall.first_token_s)}"))
    if fall.between_tokens_s is not None:
        pieces.append(Text(f"between tokens {milliseconds(fall.between_tokens_s)} (mean)"))
    for name, style in STYLES.items():
        seconds = fall.total_of(name)
        if seconds:
            pieces.append(Text(f"{name} {milliseconds(seconds)}", style))
    return Flow(pieces)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the waterfall."""

    name: str
    where: str
    style: str
    start_s: float | None = None  # None: it stands for several, and has no bar
    end_s: float = 0.0
    mark: str = "█"

    def numbers(self) -> tuple[str, str]:
        """When it began and how long it took."""
        if self.start_s is None:
            return "", ""
        return f"{self.start_s:.3f} s", milliseconds(self.end_s - self.start_s)

    def bar(self, total_s: float, width: int) -> str:
        """Its place in the whole."""
        return "" if self.start_s is None else _bar(self.start_s, self.end_s, total_s, width, self.mark)


def _bars(fall: Waterfall, width: int, most_chunks: int | None) -> Table:
    """Names and numbers have the width that they need; bars and places share the rest."""
    rows = [row for phase in fall.phases for row in _rows(phase, most_chunks)]
    starts, durations = zip(*(row.numbers() for row in rows), strict=True) if rows else ((), ())
    own = [max(map(len, column), default=0) for column in ([row.name for row in rows], starts, durations)]
    left = width - sum(own) - 4 * _GAP
    where = min(
        max((len(row.where) for row in rows), default=0), _MOST_WHERE, max(left - _LEAST_BAR, _LEAST_WHERE)
    )
    bar = max(left - where, 1)
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    for column_width, justify in ((own[0], "left"), (bar, "left"), (own[1], "right"), (own[2], "right")):
        table.add_column(width=column_width, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    table.add_column(width=where, no_wrap=True, overflow="ellipsis")
    for row, start, took in zip(rows, starts, durations, strict=True):
        drawn = row.bar(fall.total_s, bar)
        table.add_row(Text(row.name, row.style), Text(drawn, row.style), start, took, Text(row.where))
    return table


def _rows(phase: Phase, most: int | None) -> Iterator[_Row]:
    style = STYLES[phase.name]
    yield _Row(phase.name, _where(phase), style, phase.start_s, phase.end_s)
    if len(phase.chunks) < 2 and phase.name == "prefill":
        return  # it is the phase
    shown = phase.chunks if most is None else phase.chunks[:most]
    for chunk in shown:
        where = f"step {chunk.step}, {chunk.tokens} tokens"
        yield _Row("  chunk", where, f"dim {style}", chunk.start_s, chunk.end_s, "▪")
    left = phase.chunks[len(shown) :]
    if left:
        tokens = sum(chunk.tokens for chunk in left)
        yield _Row("  ...", f"{len(left)} more, {tokens} tokens: see --chunks", "dim")


def _where(phase: Phase) -> str:
    parts = [phase.worker_id] if phase.worker_id else []
    if phase.first_step:
        last = f" to {phase.last_step}" if phase.last_step > phase.first_step else ""
        parts.append(f"step {phase.first_step}{last}")
    if phase.detail:
        parts.append(phase.detail)
    return ", ".join(parts)


def _bar(start_s: float, end_s: float, total_s: float, width: int, mark: str = "█") -> str:
    """At least one character, so that nothing is lost."""
    if total_s <= 0:
        return mark
    first = min(int(start_s / total_s * width), width - 1)
    return " " * first + mark * max(1, round(end_s / total_s * width) - first)
