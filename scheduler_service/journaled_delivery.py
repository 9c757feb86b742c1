"""Owns the order of keeping and telling: what a client is to receive is in the journal first.

Events wait here for the commit that has them. Planning does not.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from scheduler_service.core.events import Admitted, Event, Finished, Preempted, Resumed, TokenBatch
from scheduler_service.core.request import RequestSpec
from scheduler_service.delivery import Delivery
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import Acceptance, SavedRequest
from scheduler_service.journal_store import INDEX_BITS, NOT_KEPT
from scheduler_service.presentation import Presentation
from scheduler_service.served_model import ServedModel
from scheduler_service.telemetry import RequestTrace, Telemetry


class JournaledDelivery(Delivery):
    """A Delivery whose requests outlive the process."""

    def __init__(
        self,
        journal: Journal,
        models: Callable[[], Mapping[str, ServedModel]],
        telemetry: Telemetry,
        clock: Callable[[], float],
        on_sink_fault: Callable[[str, str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """`on_closed`: called when all that a request has was handed out."""
        super().__init__(telemetry, clock, on_sink_fault)
        self._on_closed = on_closed
        self._journal = journal
        self._models = models
        self._numbers: dict[str, int] = {}  # of live requests in the journal
        self._held: deque[tuple[int, list[Event]]] = deque()  # with the ticket that they wait for
        self._committed = 0
        journal.on_commit = self._release

    def reopen(self, saved: SavedRequest, spec: RequestSpec, now: float, trace: RequestTrace | None) -> None:
        """A request of an earlier process was accepted again. It is in the journal already."""
        super().open(spec, now, trace)
        self._numbers[spec.request_id] = saved.number
        # Its sink has the ends of these already.
        ended = {index for index, each in enumerate(saved.candidates) if each.end is not None}
        self._live[spec.request_id].open_indices -= ended
        if trace is not None:
            trace.leave_out(ended)
            begun = {index for index, each in enumerate(saved.candidates) if each.token_ids}
            trace.goes_on(begun - ended)

    def open(self, spec: RequestSpec, now: float, trace: RequestTrace | None) -> None:
        """See Delivery."""
        super().open(spec, now, trace)
        deadline_at = None if spec.deadline is None else time.time() + spec.deadline - now
        presentation = getattr(spec.sink, "presentation", Presentation())
        fingerprint = self._models()[spec.model].fingerprint
        self._numbers[spec.request_id] = self._journal.accept(
            Acceptance(spec, presentation, fingerprint, deadline_at)
        )

    def abandon(self, request_id: str) -> None:
        """See Delivery. Nobody can come back for it."""
        number = self._numbers.get(request_id, NOT_KEPT)
        if number != NOT_KEPT:
            self._numbers[request_id] = NOT_KEPT
            self._journal.forget(number)

    def deliver(self, events: Iterable[Event]) -> None:
        """See Delivery."""
        events = [self._keep(event) for event in events]
        if not events:
            return
        ticket = self._journal.last_ticket
        if ticket <= self._committed and not self._held:
            super().deliver(events)
        else:
            self._held.append((ticket, events))

    def _keep(self, event: Event) -> Event:
        """Notes what a new process would need to know of an event; returns one that may be kept."""
        if isinstance(event, TokenBatch):
            # Copies, since the core's own columns change.
            candidates, token_ids = list(event.candidates), array("i", event.token_ids)
            numbers = self._numbers
            keys = array("q", [numbers[c.request_id] << INDEX_BITS | c.index for c in candidates])
            self._journal.add_tokens(keys, token_ids, event.logprobs)
            return TokenBatch(candidates, token_ids, event.logprobs)
        if isinstance(event, Finished):
            number = self._numbers.get(event.request_id, NOT_KEPT)
            if number != NOT_KEPT:
                self._journal.end(number, self._num_candidates(event.request_id), event)
        return event

    def _num_candidates(self, request_id: str) -> int:
        return self._live[request_id].spec.n

    def _release(self, ticket: int) -> None:
        self._committed = ticket
        while self._held and self._held[0][0] <= ticket:
            super().deliver(self._held.popleft()[1])

    def _hand_out(self, event: Admitted | Preempted | Resumed | Finished) -> None:
        super()._hand_out(event)
        if isinstance(event, Finished) and not self.is_open(event.request_id):
            self._numbers.pop(event.request_id, None)
            self._on_closed(event.request_id)
