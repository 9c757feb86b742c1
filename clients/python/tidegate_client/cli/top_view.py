"""What `tidegate top` shows: a scheduler as a picture that fits the terminal. Owns no connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate.admin.v1 import admin_pb2 as pb
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

    def picture(self, height: int, *, keys: bool) -> Group:
        """As many requests as fit into `height` lines. `keys`: whether to say which keys there are."""
        parts = [self._headline(), *self._numbers(), Text(), self._workers(), Text(), self._queues()]
        heads = [_head(head) for head in self.seen.heads.values() if head.request_id]
        tables = len(self.seen.workers) + max(1, len(self.seen.queues)) + 2  # and their titles
        used = 3 + 2 + tables + len(heads) + 3 + keys
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
        return text

    def _numbers(self) -> list[RenderableType]:
        counters, recent, seconds = self.seen.counters, self.latency.recent, self.latency.recent_seconds
        first, between = Text("first token  "), Text("between tokens  ")
        first.append(_quantiles(recent.time_to_first_token))
        between.append(_quantiles(recent.between_tokens))
        out_rate = sum(recent.output_tokens) / seconds if seconds else 0.0
        in_rate = sum(recent.prefill_tokens) / seconds if seconds else 0.0
        queried = counters.prefix_queried_tokens
        hits = f"{counters.prefix_hit_tokens / queried:.0%}" if queried else "-"
        counts = (
            f"{out_rate:.1f} output and {in_rate:.1f} prompt tokens/s   prefix hits {hits}   "
            f"{counters.preemptions} preemptions   {counters.requests_moved} moved   "
            f"{counters.requests_finished} finished   {counters.requests_failed} failed   "
            f"{counters.requests_refused} refused"
        )
        return [Text.assemble(first, "   ", between, f"   (last {seconds:.0f} s)"), Text(counts)]

    def _workers(self) -> Table:
        table = _table("worker", "status", "KV blocks", ">used", ">cached", ">running", ">steps/s", "")
        for worker in self.seen.workers.values():
            status = pb.WorkerStatus.Name(worker.status).removeprefix("WORKER_STATUS_").lower()
            table.add_row(
                Text(worker.worker_id),
                Text(status, _WORKER_STYLES.get(status, "")),
                _bar(worker.blocks_used, worker.blocks_cached, worker.blocks_total),
                f"{worker.blocks_used}/{worker.blocks_total}",
                str(worker.blocks_cached),
                f"{worker.running_requests}/{worker.num_slots}",
                f"{worker.steps_per_second:.1f}",
                Text("" if status == "ready" else worker.last_error, "red"),
            )
        if not self.seen.workers:
            table.add_row("none", *[""] * 7)
        return table

    def _queues(self) -> Table:
        table = _table(
            "tenant", ">priority", "model", ">waiting", ">preempted", ">running", ">tokens to compute"
        )
        for queue in sorted(self.seen.queues.values(), key=lambda each: (each.priority, each.tenant)):
            table.add_row(
                Text(queue.tenant),
                str(queue.priority),
                Text(queue.model),
                str(queue.waiting_requests),
                str(queue.preempted_requests),
                str(queue.running_requests),
                str(queue.waiting_tokens),
            )
        if not self.seen.queues:
            table.add_row("none", *[""] * 6)
        return table

    def _requests(self, rows: int) -> Table:
        live = sorted(self.seen.requests.values(), key=ORDERS[self.order])  # type: ignore[arg-type]
        hidden = len(live) - rows + self.seen.totals.hidden_requests
        titles = (
            "request",
            "status",
            "tenant",
            ">prio",
            "progress",
            ">prompt",
            ">output",
            ">blocks",
            ">preempted",
        )
        table = _table(*titles, "worker")
        for request in live[:rows]:
            status = pb.RequestStatus.Name(request.status).removeprefix("REQUEST_STATUS_").lower()
            name = f"{request.request_id}/{request.index}" if request.index else request.request_id
            table.add_row(
                Text(name, overflow="ellipsis"),
                Text(status, _REQUEST_STYLES.get(status, "")),
                Text(request.tenant),
                str(request.priority),
                _progress(request),
                str(request.prompt_tokens),
                str(request.output_tokens),
                str(request.blocks),
                str(request.preemptions),
                Text(request.worker_id),
            )
        if hidden > 0:
            table.add_row(Text(f"and {hidden} more", "dim"), *[""] * 9)
        return table


def _table(*titles: str) -> Table:
    """A title that begins with > is of a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold dim", pad_edge=False)
    for title in titles:
        table.add_column(
            title.removeprefix(">"), justify="right" if title.startswith(">") else "left", no_wrap=True
        )
    return table


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
    text = Text.assemble("next of ", head.model, " is ", (head.request_id, "bold"), f": {reasons}")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
