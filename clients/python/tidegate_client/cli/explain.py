"""`tidegate explain`: why a request waits, or what became of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.text import Text

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.screen import out

_MOVES = ("worker_lost", "drain")


def explain(
    request_id: Annotated[str, typer.Argument(help="Name of the request, live or ended lately.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Say why a request waits, and what has become of it."""
    with AdminClient(address) as admin:
        candidates = admin.explain(request_id)
    if as_json:
        content = [MessageToDict(each, preserving_proto_field_name=True) for each in candidates]
        out.print_json(json.dumps(content))
        return
    for candidate in candidates:
        for line in _lines(candidate):
            out.print(Text(line), soft_wrap=True)


def _lines(candidate: pb.CandidateExplanation) -> list[str]:
    lines = [_headline(candidate)]
    lines += [f"  {blocker.text}" for blocker in candidate.blockers]
    lines += [f"  {entry.at_seconds:10.3f} s  {_happening(entry)}" for entry in candidate.timeline]
    return lines


def _happening(entry: pb.TimelineEntry) -> str:
    if entry.event == "preempted" and entry.detail in _MOVES:  # its worker went; nobody took its place
        return f"moved from {entry.worker_id}: {entry.detail}"
    where = f" on {entry.worker_id}" if entry.worker_id else ""
    detail = f": {entry.detail}" if entry.detail else ""
    return f"{entry.event}{where}{detail}"


def _headline(candidate: pb.CandidateExplanation) -> str:
    state = candidate.state
    status = pb.RequestStatus.Name(state.status).removeprefix("REQUEST_STATUS_").lower()
    parts = [f"{status}: {candidate.finish_reason}" if candidate.finish_reason else status]
    if state.worker_id:
        parts[0] += f" on {state.worker_id}"
    parts.append(f"{state.prompt_tokens} prompt and {state.output_tokens} output tokens")
    if not candidate.finish_reason:
        parts.append(
            f"{state.computed_tokens} computed, {state.blocks} blocks, {state.age_seconds:.1f} s old"
        )
    if candidate.HasField("position"):
        parts.append(f"{candidate.position - 1} ahead in the queue")
    if candidate.HasField("estimated_start_seconds"):
        parts.append(f"runs in about {candidate.estimated_start_seconds:.1f} s")
    name = f"{state.request_id}/{state.index}" if state.index else state.request_id
    return f"{name} {', '.join(parts)}"
