"""`tidegate status`: workers, queue and blocks of a scheduler."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.failures import Failure
from tidegate_client.cli.screen import out


def status(
    requests: Annotated[bool, typer.Option("--requests", help="List the live requests too.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every invariant of queues and block tables.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Show workers, queue and KV blocks."""
    with AdminClient(address) as admin:
        state = admin.state(verify=verify)
        live = list(admin.requests()) if requests else []
    if as_json:
        content = _to_dict(state) | ({"requests": list(map(_to_dict, live))} if requests else {})
        out.print_json(json.dumps(content))
    else:
        _print_state(state)
        if requests:
            out.print(_requests_table(live))
    if state.violations:
        raise Failure("invariants do not hold: " + "; ".join(state.violations))


def _to_dict(message: pb.GetStateResponse | pb.RequestState) -> dict[str, object]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_state(state: pb.GetStateResponse) -> None:
    counters = state.counters
    draining = ", draining: it takes no new requests" if state.draining else ""
    out.print(f"Tidegate {state.version}{draining}")
    out.print(
        f"{state.running_requests} running, {state.waiting_requests} waiting "
        f"({state.waiting_tokens} tokens to compute); {counters.requests_finished} finished, "
        f"{counters.requests_cancelled} cancelled, {counters.requests_failed} failed, "
        f"{counters.requests_refused} refused, {counters.preemptions} preemptions, "
        f"{counters.requests_moved} moved"
    )
    if counters.prefix_queried_tokens:
        share = counters.prefix_hit_tokens / counters.prefix_queried_tokens
        out.print(f"prefix cache: {share:.0%} of {counters.prefix_queried_tokens} prompt tokens were hits")
    if not state.workers:
        out.print("no workers: start one with `python -m worker_service --model MODEL --scheduler HOST:PORT`")
        return
    table = Table(
        "worker", "status", "model", "running", "KV blocks used", "cached", "free", "steps", "last error"
    )
    for worker in state.workers:
        name = pb.WorkerStatus.Name(worker.status).removeprefix("WORKER_STATUS_").lower()
        table.add_row(
            worker.worker_id,
            name,
            worker.model,
            f"{worker.running_requests} of {worker.num_slots}",
            f"{worker.blocks_used} of {worker.blocks_total}",
            str(worker.blocks_cached),
            str(worker.blocks_free),
            str(worker.steps),
            worker.last_error,
        )
    out.print(table)


def _requests_table(live: list[pb.RequestState]) -> Table:
    table = Table(
        "request", "status", "tenant", "priority", "prompt", "output", "blocks", "worker", "age", "preempted"
    )
    for request in live:
        name = f"{request.request_id}/{request.index}" if request.index else request.request_id
        table.add_row(
            name,
            pb.RequestStatus.Name(request.status).removeprefix("REQUEST_STATUS_").lower(),
            request.tenant,
            str(request.priority),
            str(request.prompt_tokens),
            str(request.output_tokens),
            str(request.blocks),
            request.worker_id,
            f"{request.age_seconds:.1f} s",
            str(request.preemptions),
        )
    return table
