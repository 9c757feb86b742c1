"""What `tidegate top` shows: a scheduler as a picture that fits the terminal. Owns no connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.cli.screen import Flow
from tidegate_client.cli.status import host_blocks, request_name, request_status, worker_status
from tidegate_client.cli.table import Column, FittingTable
from tidegate_client.watched_state import WatchedState

_LEAST_ROWS = 3
_BAR_WIDTH = 16
_WORKER_STYLES = {"ready": "green", "draining": "yellow", "connecting": "red"}
_REQUEST_STYLES = {"running": "green", "waiting": "yellow", "preempted": "red"}

ORDERS: dict[str, Callable[[pb.RequestState], object]] = {
    "arrival": lambda request: request.key,
    "status": lambda request: (request.status != pb.REQUEST_STATUS_RUNNING, request.status, request.key),
    "blocks": lambda request: -request.blocks,
    "output": lambda request: -request.output_tokens,
    "preemptions": lambda request: -request.preemptions,
    "tenant": lambda request: (request.tenant, request.priority, request.key),
}
"""What the rows of requests can be sorted by."""


@dataclass(slots=True)
class View:
    """What is shown, and how."""

    seen: WatchedState
    latency: pb.GetLatencyResponse
    order: str = "arrival"
    paused: bool = False

    def picture(self, width: int, height: int, *, keys: bool) -> Group:
        """As many requests as fit into `height` lines of `width` columns. `keys`: whether to say which keys
        there are."""
        numbers, errors = self._numbers(width), self._worker_errors()
        parts = [self._headline(), *numbers, Text(), self._workers(), *errors, Text(), self._queues()]
        heads = [_head(head) for head in self.seen.heads.values() if head.request_id]
        tables = max(1, len(self.seen.workers)) + max(1, len(self.seen.queues)) + 2  # and their titles
        used = 1 + len(numbers) + 2 + tables + len(errors) + len(heads) + 3 + keys
        rows = max(_LEAST_ROWS, height - used)
        parts += [*heads, Text(), self._requests(rows)]
        if keys:
            parts.append(Text(f"q quit   s sort: {self.order}   p {self._pause_word()}", "reverse"))
        return Group(*parts)

    def _pause_word(self) -> str:
        return "go on" if self.paused else "pause"

    def _headline(self) -> Text:
        totals = self.seen.totals
        text = Text.assemble((f"Tidegate {self.seen.version}", "bold"))
        if totals.draining:
            text.append("  draining: takes no new requests", "yellow")
        if self.paused:
            text.append("  paused", "yellow")
        text.append(f"   {totals.running_requests} running   {totals.waiting_requests} waiting")
        text.append(f" ({totals.waiting_tokens} tokens to compute)" if totals.waiting_requests else "")
        return _line(text)

    def _numbers(self, width: int) -> list[RenderableType]:
        counters, recent, seconds = self.seen.counters, self.latency.recent, self.latency.recent_seconds
        out_rate = sum(recent.output_tokens) / seconds if seconds else 0.0
        in_rate = sum(recent.prefill_tokens) / seconds if seconds else 0.0
        queried = counters.prefix_queried_tokens
        hits = f"{counters.prefix_hit_tokens / queried:.0%}" if queried else "-"
        times = [
            f"first token  {_quantiles(recent.time_to_first_token)}",
            f"between tokens  {_quantiles(recent.between_tokens)}",
            f"(last {seconds:.0f} s)",
        ]
        counts = [
            f"{out_rate:.1f} output and {in_rate:.1f} prompt tokens/s",
            f"prefix hits {hits}",
            f"{counters.preemptions} preemptions",
            f"{counters.requests_moved} moved",
            f"{counters.requests_finished} finished",
            f"{counters.requests_failed} failed",
            f"{counters.requests_refused} refused",
        ]
        return [*Flow(times).lines(width), *Flow(counts).lines(width)]

    def _workers(self) -> RenderableType:
        workers = list(self.seen.workers.values())
        return FittingTable(_WORKER_COLUMNS, workers, None if workers else "no workers")

    def _worker_errors(self) -> list[Text]:
        return [
            _line(Text(f"{worker.worker_id}: {worker.last_error}", "red"))
            for worker in self.seen.workers.values()
            if worker.last_error and worker.status != pb.WORKER_STATUS_READY
        ]

    def _queues(self) -> RenderableType:
        queues = sorted(self.seen.queues.values(), key=lambda each: (each.priority, each.tenant))
        return FittingTable(_QUEUE_COLUMNS, queues, None if queues else "no queues")

    def _requests(self, rows: int) -> RenderableType:
        live = sorted(self.seen.requests.values(), key=ORDERS[self.order])  # type: ignore[arg-type]
        hidden = len(live) - rows + self.seen.totals.hidden_requests
        return FittingTable(_REQUEST_COLUMNS, live[:rows], f"and {hidden} more" if hidden > 0 else None)


def _line(text: Text) -> Text:
    """Stays one line, however narrow the terminal is."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _styled(name: str, styles: dict[str, str]) -> Text:
    return Text(name, styles.get(name, ""))


def _bar(used: int, cached: int, total: int) -> Text:
    """Used blocks, then cached ones, then free ones."""
    if not total:
        return Text()
    full = min(_BAR_WIDTH, -(-used * _BAR_WIDTH // total))
    half = min(_BAR_WIDTH - full, round(cached / total * _BAR_WIDTH))
    return Text.assemble(
        ("█" * full, "cyan"), ("▒" * half, "cyan"), ("░" * (_BAR_WIDTH - full - half), "dim")
    )


def _progress(request: pb.RequestState) -> Text:
    """Of the prompt while that is computed, then of the most tokens that it may have."""
    if request.status != pb.REQUEST_STATUS_RUNNING:
        return Text("░" * _BAR_WIDTH, "dim")
    done, total, style = request.output_tokens, request.max_tokens, "green"
    if request.computed_tokens < request.prompt_tokens:
        done, total, style = request.computed_tokens, request.prompt_tokens, "cyan"
    full = min(_BAR_WIDTH, done * _BAR_WIDTH // total) if total else 0
    return Text.assemble(("█" * full, style), ("░" * (_BAR_WIDTH - full), "dim"))


def _quantiles(columns: pb.Quantiles) -> str:
    if not columns.counts or not columns.counts[0]:
        return "-"
    return f"p50 {columns.p50_ms[0]:.0f}  p95 {columns.p95_ms[0]:.0f}  p99 {columns.p99_ms[0]:.0f} ms"


def _head(head: pb.QueueHead) -> Text:
    reasons = "; ".join(blocker.text for blocker in head.blockers)
    return _line(Text.assemble("next of ", head.model, " is ", (head.request_id, "bold"), f": {reasons}"))


_WORKER_COLUMNS: list[Column[pb.WorkerState]] = [
    Column("worker", lambda worker: worker.worker_id),
    Column("status", lambda worker: _styled(worker_status(worker), _WORKER_STYLES)),
    Column(
        "KV blocks",
        lambda worker: _bar(worker.blocks_used, worker.blocks_cached, worker.blocks_total),
        rank=3,
    ),
    Column("used", lambda worker: f"{worker.blocks_used}/{worker.blocks_total}", number=True),
    Column("host used", lambda worker: host_blocks(worker, "/"), rank=2, number=True, optional=True),
    Column("cached", lambda worker: str(worker.blocks_cached), rank=4, number=True),
    Column("running", lambda worker: f"{worker.running_requests}/{worker.num_slots}", number=True),
    Column("steps/s", lambda worker: f"{worker.steps_per_second:.1f}", rank=1, number=True),
]
_QUEUE_COLUMNS: list[Column[pb.QueueState]] = [
    Column("tenant", lambda queue: queue.tenant),
    Column("priority", lambda queue: str(queue.priority), rank=2, number=True),
    Column("model", lambda queue: queue.model, rank=3),
    Column("waiting", lambda queue: str(queue.waiting_requests), number=True),
    Column("preempted", lambda queue: str(queue.preempted_requests), rank=4, number=True),
    Column("running", lambda queue: str(queue.running_requests), number=True),
    Column("tokens to compute", lambda queue: str(queue.waiting_tokens), rank=1, number=True),
]
_REQUEST_COLUMNS: list[Column[pb.RequestState]] = [
    Column("request", request_name),
    Column("status", lambda request: _styled(request_status(request), _REQUEST_STYLES)),
    Column("tenant", lambda request: request.tenant, rank=3),
    Column("prio", lambda request: str(request.priority), rank=5, number=True),
    Column("progress", lambda request: _progress(request), rank=1),
    Column("prompt", lambda request: str(request.prompt_tokens), number=True),
    Column("output", lambda request: str(request.output_tokens), number=True),
    Column("blocks", lambda request: str(request.blocks), rank=4, number=True),
    Column("preempted", lambda request: str(request.preemptions), rank=6, number=True),
    Column("worker", lambda request: request.worker_id, rank=2),
]
