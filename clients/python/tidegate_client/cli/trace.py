"""`tidegate trace`: where the time of one request went, drawn from what the scheduler remembers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
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
from tidegate_client.cli.screen import milliseconds, out
from tidegate_client.waterfall import Phase, Waterfall, waterfall

STYLES = {"queue": "yellow", "prefill": "cyan", "decode": "green", "preempted": "red"}
_MOST_CHUNKS = 8
_LEAST_BAR = 20
_TEXT_WIDTH = 76  # of the columns beside the bars


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
    parts: list[RenderableType] = [_headline(candidate), _sums(fall), Text()]
    parts.append(_bars(fall, max(_LEAST_BAR, width - _TEXT_WIDTH), most_chunks))
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


def _sums(fall: Waterfall) -> Text:
    text = Text.assemble("total ", (milliseconds(fall.total_s), "bold"))
    if fall.first_token_s is not None:
        text.append(f"   time to first token {milliseconds(fall.first_token_s)}")
    if fall.between_tokens_s is not None:
        text.append(f"   between tokens {milliseconds(fall.between_tokens_s)} (mean)")
    for name, style in STYLES.items():
        seconds = fall.total_of(name)
        if seconds:
            text.append(f"   {name} {milliseconds(seconds)}", style)
    return text


def _bars(fall: Waterfall, width: int, most_chunks: int | None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=9, no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(width=9, no_wrap=True, justify="right")
    table.add_column(width=8, no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    for phase in fall.phases:
        style = STYLES[phase.name]
        bar = _bar(phase.start_s, phase.end_s, fall.total_s, width)
        where = Text(_where(phase))
        start, took = f"{phase.start_s:.3f} s", milliseconds(phase.duration_s)
        table.add_row(Text(phase.name, style), Text(bar, style), start, took, where)
        for row in _chunk_rows(phase, fall.total_s, width, most_chunks):
            table.add_row(*row)
    return table


def _where(phase: Phase) -> str:
    parts = [phase.worker_id] if phase.worker_id else []
    if phase.first_step:
        last = f" to {phase.last_step}" if phase.last_step > phase.first_step else ""
        parts.append(f"step {phase.first_step}{last}")
    if phase.detail:
        parts.append(phase.detail)
    return ", ".join(parts)


def _chunk_rows(
    phase: Phase, total_s: float, width: int, most: int | None
) -> Iterator[tuple[Text, Text, str, str, Text]]:
    if len(phase.chunks) < 2 and phase.name == "prefill":
        return  # it is the phase
    shown = phase.chunks if most is None else phase.chunks[:most]
    for chunk in shown:
        bar = Text(_bar(chunk.start_s, chunk.end_s, total_s, width, "▪"), f"dim {STYLES[phase.name]}")
        took = milliseconds(chunk.end_s - chunk.start_s)
        where = Text(f"step {chunk.step}, {chunk.tokens} tokens", "dim")
        yield Text("  chunk", "dim"), bar, f"{chunk.start_s:.3f} s", took, where
    left = phase.chunks[len(shown) :]
    if left:
        tokens = sum(chunk.tokens for chunk in left)
        where = Text(f"{len(left)} more chunks with {tokens} tokens: see --chunks", "dim")
        yield Text("  ...", "dim"), Text(), "", "", where


def _bar(start_s: float, end_s: float, total_s: float, width: int, mark: str = "█") -> str:
    """At least one character, so that nothing is lost."""
    if total_s <= 0:
        return mark
    first = min(int(start_s / total_s * width), width - 1)
    return " " * first + mark * max(1, round(end_s / total_s * width) - first)
