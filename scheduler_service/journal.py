"""Owns the journal of a running scheduler: a thread that writes what is to outlive the process, in order.

Whatever has come by the time the thread is free goes into one commit. A commit outlives the process at once;
a power cut may take the last ones with it, never half of one.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scheduler_service.core.events import Finished
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.journal_codec import READING_ERRORS, Acceptance, SavedRequest
from scheduler_service.journal_store import DamagedJournalError, JournalStore, set_aside
from scheduler_service.logs import EventLog

_PRUNE_INTERVAL_S = 10.0

_log = EventLog("journal")
_Change = Callable[[JournalStore], object]


class Journal:
    """What the event loop does with the journal. Nothing here waits, except close().

    If the file cannot be written any more, that is logged once, and the service goes on without.
    """

    def __init__(self, path: Path, retention_s: float, max_finished: int) -> None:
        """Opens the file. One that cannot be read is set aside. Raises OSError: it cannot be used."""
        self.path = path
        self.on_commit: Callable[[int], None] = lambda ticket: None
        """Called from the event loop: what was noted up to this ticket is kept."""
        self._retention_s = retention_s
        self._max_finished = max_finished
        self._store = _open(path)
        self.unfinished: list[SavedRequest] = self._store.unfinished
        """What an earlier process had not finished."""
        self.last_epoch = self._store.last_epoch
        """The highest epoch that an earlier process has used; 0: none."""
        self._next_number = self._store.next_number
        self._last_ticket = 0
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._broken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)

    def start(self) -> None:
        """Begins to write. To be called from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Writes what is left, and closes the file. What comes after that is not kept."""
        if self._thread.is_alive():
            self._changes.put(None)
            self._thread.join()
        self._loop = None
        self.on_commit(self._last_ticket)

    @property
    def last_ticket(self) -> int:
        """That of the last change."""
        return self._last_ticket

    def accept(self, acceptance: Acceptance) -> int:
        """Notes a request that was accepted. Returns its number."""
        number = self._next_number
        self._next_number += 1
        self._put(lambda store: store.accept(number, acceptance))
        return number

    def add_tokens(
        self, candidates: array[int], token_ids: array[int], logprobs: Mapping[int, TokenLogprobs] | None
    ) -> None:
        """Notes a step's tokens; see JournalStore."""
        self._put(lambda store: store.add_tokens(candidates, token_ids, logprobs))

    def end(self, number: int, num_candidates: int, end: Finished) -> None:
        """Notes a candidate's end."""
        self._put(lambda store: store.end(number, num_candidates, end))

    def note_epoch(self, epoch: int) -> None:
        """Notes the highest epoch, which is kept a commit later."""
        self._put(lambda store: store.note_epoch(epoch))

    def forget(self, number: int) -> None:
        """Drops a request."""
        self._put(lambda store: store.forget(number))

    async def find(self, request_id: str) -> SavedRequest | None:
        """The request of that name, if it is known."""
        loop = self._loop
        if loop is None:
            return None
        question = _Question(request_id, loop, loop.create_future())
        self._put(question)
        return await question.answer

    def _put(self, change: _Change) -> None:
        if self._loop is not None:
            self._last_ticket += 1
            self._changes.put(change)

    # The thread

    def _write(self) -> None:
        ticket, prune_at, going_on = 0, 0.0, True
        while going_on:
            changes = self._next_batch()
            if changes[-1] is None:
                going_on = False
                changes.pop()
            ticket += len(changes)
            if time.monotonic() >= prune_at:
                prune_at = time.monotonic() + _PRUNE_INTERVAL_S
                changes.append(
                    partial(
                        JournalStore.prune, retention_s=self._retention_s, max_finished=self._max_finished
                    )
                )
            self._apply([change for change in changes if change is not None])
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._committed, ticket)
        if not self._broken:
            self._store.close()

    def _committed(self, ticket: int) -> None:
        self.on_commit(ticket)

    def _next_batch(self) -> list[_Change | None]:
        batch = [self._changes.get()]
        while batch[-1] is not None:
            try:
                batch.append(self._changes.get_nowait())
            except queue.Empty:
                break
        return batch

    def _apply(self, changes: list[_Change]) -> None:
        try:
            for change in changes:
                if not self._broken or isinstance(change, _Question):
                    change(self._store)
            if not self._broken:
                self._store.commit()
        except sqlite3.Error as error:
            self._broken = True
            _log.error("journal_failed", path=str(self.path), reason=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Question:
    """Reads one request. It is answered whatever happens."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[SavedRequest | None]

    def __call__(self, store: JournalStore) -> None:
        saved = None
        try:
            saved = store.find(self.request_id)
        except (sqlite3.Error, *READING_ERRORS) as error:
            reason = f"{type(error).__name__}: {error}"
            _log.error("journal_unreadable", request_id=self.request_id, reason=reason)
        self.loop.call_soon_threadsafe(self._give, saved)

    def _give(self, saved: SavedRequest | None) -> None:
        if not self.answer.done():
            self.answer.set_result(saved)


def _open(path: Path) -> JournalStore:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot use the journal {path}: its folder cannot be made: {error}") from error
    try:
        return JournalStore(path)
    except DamagedJournalError as error:
        aside = set_aside(path)
        _log.error("journal_damaged", path=str(path), kept_as=str(aside), reason=str(error))
        return JournalStore(path)
