"""`tidegate status`: workers, queue and blocks of a scheduler."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.failures import BAD_REQUEST, Failure
from tidegate_client.cli.screen import Flow, out
from tidegate_client.cli.table import Column, FittingTable
from tidegate_client.watched_state import WatchedState


def status(
    requests: Annotated[bool, typer.Option("--requests", help="List the live requests too.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every invariant of queues and block tables.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it live, until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --watch, each update in a line.")
    ] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Show workers, queue and KV blocks."""
    if watch:
        if verify:
            raise Failure("--verify checks once: leave out --watch", BAD_REQUEST)
        with suppress(KeyboardInterrupt):
            _watch(address, requests, as_json)
        return
    with AdminClient(address) as admin:
        state = admin.state(verify=verify)
        live = list(admin.requests()) if requests else []
    if as_json:
        content = _to_dict(state) | ({"requests": list(map(_to_dict, live))} if requests else {})
        out.print_json(json.dumps(content))
    else:
        out.print(_state(state))
        if requests:
            out.print(_requests_table(live))
    if state.violations:
        raise Failure("invariants do not hold: " + "; ".join(state.violations))


def _watch(address: str, requests: bool, as_json: bool) -> None:
    """Shows each update, in place of the one before where the output is a terminal."""
    seen = WatchedState()
    with AdminClient(address) as admin, Live(console=out, auto_refresh=False) as screen:
        for update in admin.watch():
            seen.apply(update)
            if as_json:
                content = MessageToDict(update, preserving_proto_field_name=True)
                out.print(Text(json.dumps(content)), soft_wrap=True)
            elif out.is_terminal:
                screen.update(_picture(seen, requests), refresh=True)
            else:
                out.print(_picture(seen, requests))


def _picture(seen: WatchedState, requests: bool) -> Group:
    parts: list[RenderableType] = [_state(_as_state(seen))]
    parts += [_head(head) for head in seen.heads.values() if head.request_id]
    if requests:
        parts.append(_requests_table(sorted(seen.requests.values(), key=lambda each: each.key)))
    return Group(*parts)


def _as_state(seen: WatchedState) -> pb.GetStateResponse:
    totals = seen.totals
    return pb.GetStateResponse(
        version=seen.version,
        draining=totals.draining,
        workers=seen.workers.values(),
        waiting_requests=totals.waiting_requests,
        running_requests=totals.running_requests,
        waiting_tokens=totals.waiting_tokens,
        counters=seen.counters,
    )


def _head(head: pb.QueueHead) -> Text:
    reasons = "; ".join(blocker.text for blocker in head.blockers)
    return Text(f"next of {head.model} is {head.request_id}: {reasons}")


def _to_dict(message: pb.GetStateResponse | pb.RequestState) -> dict[str, object]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _state(state: pb.GetStateResponse) -> Group:
    counters = state.counters
    draining = ", draining: it takes no new requests" if state.draining else ""
    lines: list[RenderableType] = [f"Tidegate {state.version}{draining}"]
    counts = [
        f"{state.running_requests} running",
        f"{state.waiting_requests} waiting ({state.waiting_tokens} tokens to compute)",
        f"{counters.requests_finished} finished",
        f"{counters.requests_cancelled} cancelled",
        f"{counters.requests_failed} failed",
        f"{counters.requests_refused} refused",
        f"{counters.preemptions} preemptions",
        f"{counters.requests_moved} moved",
    ]
    lines.append(Flow(counts, ", "))
    if counters.prefix_queried_tokens:
        share = counters.prefix_hit_tokens / counters.prefix_queried_tokens
        lines.append(f"prefix cache: {share:.0%} of {counters.prefix_queried_tokens} prompt tokens were hits")
    if not state.workers:
        lines.append(
            "no workers: start one with `python -m worker_service --model MODEL --scheduler HOST:PORT`"
        )
        return Group(*lines)
    errors = [
        Text(f"{worker.worker_id}: {worker.last_error}") for worker in state.workers if worker.last_error
    ]
    return Group(*lines, FittingTable(_WORKER_COLUMNS, state.workers), *errors)


def _requests_table(live: list[pb.RequestState]) -> RenderableType:
    return FittingTable(_REQUEST_COLUMNS, live) if live else Text("no live requests")


def worker_status(worker: pb.WorkerState) -> str:
    """Its name for people."""
    return pb.WorkerStatus.Name(worker.status).removeprefix("WORKER_STATUS_").lower()


def host_blocks(worker: pb.WorkerState, of: str) -> str:
    """Used ones of all that it has in host memory; empty where it has none."""
    return f"{worker.host_blocks_used}{of}{worker.host_blocks_total}" if worker.host_blocks_total else ""


def request_status(request: pb.RequestState) -> str:
    """Its name for people."""
    return pb.RequestStatus.Name(request.status).removeprefix("REQUEST_STATUS_").lower()


def request_name(request: pb.RequestState) -> str:
    """Its id, and which candidate it is."""
    return f"{request.request_id}/{request.index}" if request.index else request.request_id


_WORKER_COLUMNS: list[Column[pb.WorkerState]] = [
    Column("worker", lambda worker: worker.worker_id),
    Column("status", worker_status),
    Column("model", lambda worker: worker.model, rank=5),
    Column("running", lambda worker: f"{worker.running_requests} of {worker.num_slots}", number=True),
    Column("KV blocks used", lambda worker: f"{worker.blocks_used} of {worker.blocks_total}", number=True),
    Column(
        "host blocks used", lambda worker: host_blocks(worker, " of "), rank=2, number=True, optional=True
    ),
    Column("cached", lambda worker: str(worker.blocks_cached), rank=3, number=True),
    Column("free", lambda worker: str(worker.blocks_free), rank=6, number=True),
    Column("steps", lambda worker: str(worker.steps), rank=4, number=True),
    Column("steps/s", lambda worker: f"{worker.steps_per_second:.1f}", rank=1, number=True),
]
_REQUEST_COLUMNS: list[Column[pb.RequestState]] = [
    Column("request", request_name),
    Column("status", request_status),
    Column("tenant", lambda request: request.tenant, rank=4),
    Column("priority", lambda request: str(request.priority), rank=6, number=True),
    Column("prompt", lambda request: str(request.prompt_tokens), number=True),
    Column("output", lambda request: str(request.output_tokens), number=True),
    Column("blocks", lambda request: str(request.blocks), rank=3, number=True),
    Column("worker", lambda request: request.worker_id, rank=2),
    Column("age", lambda request: f"{request.age_seconds:.1f} s", rank=1, number=True),
    Column("preempted", lambda request: str(request.preemptions), rank=5, number=True),
]
