"""Owns live requests and the way of their events: from the core to sinks, traces, metrics and the log.

It decides nothing. Sinks are others' code: what they raise ends their own request and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from scheduler_service.core.events import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    Preempted,
    Resumed,
    Timings,
    TokenBatch,
    Usage,
)
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.telemetry import RequestTrace, Telemetry

_log = EventLog("requests")


class EventSink(Protocol):
    """Where one request's events go. Called from the event loop; must not wait, and may call the engine."""

    def push_tokens(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Candidate `index` gained a token."""

    def push(self, event: Event) -> None:
        """Admitted, Preempted, Resumed or Finished. Finished is a candidate's last one."""


@dataclass(slots=True)
class _Live:
    spec: RequestSpec
    submitted_at: float
    open_indices: set[int]
    trace: RequestTrace | None

    @property
    def sink(self) -> EventSink:
        return cast(EventSink, self.spec.sink)

    @property
    def log_names(self) -> dict[str, str]:
        """What every log line about it has; the trace's id where it is sampled."""
        names = {"request_id": self.spec.request_id}
        return names if self.trace is None else {**names, "trace_id": self.trace.trace_id}


class Delivery:
    """Live requests, and the hand-out of their events in order."""

    def __init__(
        self, telemetry: Telemetry, clock: Callable[[], float], on_sink_fault: Callable[[str, str], None]
    ) -> None:
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()
        self._telemetry = telemetry
        self._clock = clock
        self._on_sink_fault = on_sink_fault
        self._live: dict[str, _Live] = {}
        self._pending: deque[Event] = deque()
        self._busy = False

    def open(self, spec: RequestSpec, now: float, trace: RequestTrace | None) -> None:
        """A request was accepted."""
        live = self._live[spec.request_id] = _Live(spec, now, set(range(spec.n)), trace)
        self.idle.clear()
        _log.debug("request_accepted", **live.log_names, prompt_tokens=len(spec.prompt_token_ids))

    def is_open(
        self,
        request_id: str,
        index: int | None = None,
        *,
        sink: EventSink | None = None,
        tenant: str | None = None,
    ) -> bool:
        """Whether a request, or one candidate of it, has not ended; with this sink and tenant, if given.

        Names are used again, sinks are not.
        """
        live = self._live.get(request_id)
        return (
            live is not None
            and (index is None or index in live.open_indices)
            and (sink is None or live.spec.sink is sink)
            and (tenant is None or live.spec.tenant == tenant)
        )

    def uses_model(self, model: str) -> bool:
        """Whether a live request is for this model."""
        return any(live.spec.model == model for live in self._live.values())

    def abandon(self, request_id: str) -> None:
        """Nobody wants the rest of a live request, which is about to end."""

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands out events. Those that a sink causes meanwhile come after these."""
        self._pending.extend(events)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                event = self._pending.popleft()
                if isinstance(event, TokenBatch):
                    self._hand_out_tokens(event)
                else:
                    self._hand_out(event)
        finally:
            self._busy = False

    def fail_all(self, incident_id: str) -> None:
        """Ends every live request with an error."""
        now = self._clock()
        self.deliver(
            [
                Finished(
                    request_id=request_id,
                    index=index,
                    reason=FinishReason.ERROR,
                    stop_token_id=None,
                    usage=Usage(len(live.spec.prompt_token_ids), 0, 0, 0),
                    timings=Timings(now - live.submitted_at, 0.0, 0.0, 0.0, None),
                    detail=f"incident {incident_id}",
                    at=now,
                )
                for request_id, live in self._live.items()
                for index in sorted(live.open_indices)
            ]
        )

    def _hand_out_tokens(self, batch: TokenBatch) -> None:
        logprobs = batch.logprobs or {}
        # Copies, since a sink may call the core.
        pairs = list(zip(batch.candidates, batch.token_ids, strict=True))
        for row, (candidate, token_id) in enumerate(pairs):
            sink: Any = candidate.sink
            try:
                sink.push_tokens(candidate.index, token_id, logprobs.get(row))
            except Exception:
                self._sink_failed(candidate.request_id)

    def _hand_out(self, event: Admitted | Preempted | Resumed | Finished) -> None:
        live = self._live.get(event.request_id)
        if live is None or event.index not in live.open_indices:
            return
        self._note(event, live)
        try:
            live.sink.push(event)
        except Exception:
            self._sink_failed(event.request_id)

    def _note(self, event: Admitted | Preempted | Resumed | Finished, live: _Live) -> None:
        names: dict[str, Any] = {**live.log_names, "index": event.index}
        if isinstance(event, Finished):
            self._note_end(event, live)
        elif isinstance(event, Admitted):
            _log.debug(
                "request_admitted", **names, worker_id=event.worker_id, cached_tokens=event.cached_tokens
            )
            if live.trace is not None:
                live.trace.admitted(event)
        elif isinstance(event, Preempted):
            _log.info("request_preempted", **names, worker_id=event.worker_id, reason=event.reason)
            if live.trace is not None:
                live.trace.preempted(event)
        else:
            _log.info(
                "request_resumed", **names, worker_id=event.worker_id, cached_tokens=event.cached_tokens
            )
            if live.trace is not None:
                live.trace.resumed(event)

    def _note_end(self, event: Finished, live: _Live) -> None:
        live.open_indices.discard(event.index)
        if not live.open_indices:
            del self._live[event.request_id]
            if not self._live:
                self.idle.set()
        if live.trace is not None:
            live.trace.finished(event)
        self._telemetry.request_finished(live.spec, event)
        write = _log.error if event.reason is FinishReason.ERROR else _log.info
        write(
            "request_finished",
            **live.log_names,
            index=event.index,
            reason=event.reason.value,
            prompt_tokens=event.usage.prompt_tokens,
            output_tokens=event.usage.output_tokens,
            duration_s=round(event.at - live.submitted_at, 4),
            **({"detail": event.detail} if event.detail else {}),
        )

    def _sink_failed(self, request_id: str) -> None:
        incident_id = new_incident_id()
        _log.error("sink_failed", request_id=request_id, incident_id=incident_id)
        self._on_sink_fault(request_id, incident_id)
