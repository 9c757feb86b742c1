"""Owns updates of the state for those who watch: when they are made, and who gets which. No gRPC.

All who watch with the same options share one feed, so each update is made once, and none while nobody
watches. A watcher holds at most one update: one that has not taken it when the next is made gets a snapshot
instead of what it missed, once it asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import NamedTuple

from scheduler_service import admin_codec as codec
from scheduler_service.core.state import Counters
from scheduler_service.core.watch import Watch
from scheduler_service.core_view import CoreView
from scheduler_service.workers import WorkerRegistry
from tidegate.admin.v1 import admin_pb2 as pb

_VERSION = version("tidegate")


class FeedOptions(NamedTuple):
    """What watchers may choose."""

    interval_ms: int
    steps: bool


class StateReader:
    """Reads the state for one feed: first everything, then what has changed since."""

    def __init__(self, engine: CoreView, registry: WorkerRegistry, steps: bool) -> None:
        self._engine = engine
        self._registry = registry
        self._watch = Watch()
        self._wants_steps = steps
        self._last_step = 0  # number of the last step that was told
        self._totals: tuple[int | bool, ...] = ()
        self._counters: Counters | None = None
        self._workers: dict[str, pb.WorkerState] = {}

    def read(self) -> pb.WatchStateResponse | None:
        """What has changed since the last call, without a sequence number. None: nothing has."""
        changes = self._engine.changes(self._watch)
        if changes.from_nothing:
            self._last_step, self._totals, self._counters, self._workers = 0, (), None, {}
        message = pb.WatchStateResponse(time_seconds=time.time())
        codec.add_changes(message, changes)
        if changes.from_nothing:
            message.version = _VERSION
        is_new = self._add_state(message, changes.hidden)
        if self._wants_steps:
            self._add_steps(message)
        # Changes of a queue or a request come with some of these too.
        told = (message.requests, message.ended_keys, message.progress.keys, message.queues, message.heads)
        is_new = is_new or any(told) or bool(message.workers or message.removed_worker_ids or message.steps)
        return message if is_new else None

    def _add_state(self, message: pb.WatchStateResponse, hidden: int) -> bool:
        """Puts totals, counters and workers into an update. Whether totals or counters are new."""
        state = self._engine.state()
        message.draining = state.draining
        message.waiting_requests = state.waiting_requests
        message.running_requests = state.running_requests
        message.waiting_tokens = state.waiting_tokens
        totals = (
            state.draining,
            state.waiting_requests,
            state.running_requests,
            state.waiting_tokens,
            hidden,
        )
        is_new = totals != self._totals or state.counters != self._counters
        if state.counters != self._counters:
            message.counters.CopyFrom(codec.counters_message(state.counters))
        self._totals, self._counters = totals, state.counters
        connected = {worker.worker_id: worker for worker in state.workers}
        before, self._workers = self._workers, {}
        now = self._engine.now()
        for record in self._registry.records():
            name = record.worker_id
            rate = self._engine.steps.rate(name, now)
            worker = codec.worker_message(record, connected.get(name), rate)
            self._workers[name] = worker
            if before.get(name) != worker:
                message.workers.append(worker)
        message.removed_worker_ids.extend(before.keys() - self._workers.keys())
        return is_new

    def _add_steps(self, message: pb.WatchStateResponse) -> None:
        log = self._engine.steps
        offset = time.time() - self._engine.now()
        for name in self._workers:
            steps = log.since(name, self._last_step)
            if steps:
                message.steps.append(codec.steps_message(name, steps, offset))
        self._last_step = log.num_answered


class Watcher:
    """One who watches."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.behind = True  # wants a snapshot
        self.waits = False
        self._update: pb.WatchStateResponse | None = None
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    async def next(self) -> pb.WatchStateResponse:
        """The next update. Raises what the reading of the state raised."""
        self.waits = True
        try:
            await self._arrived.wait()
        finally:
            self.waits = False
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        update, self._update = self._update, None
        assert update is not None  # noqa: S101 - or it would not have arrived
        return update

    def offer(self, update: pb.WatchStateResponse) -> None:
        """Gives it an update; or drops all where it has not taken the last one."""
        if self._update is None:
            self._update = update
            self._arrived.set()
        else:
            self._update = None
            self._arrived.clear()
            self.behind = True

    def fail(self, failure: Exception) -> None:
        """No more will come."""
        self._failure = failure
        self._arrived.set()


class Feed:
    """The updates for one choice of options."""

    def __init__(self, options: FeedOptions, new_reader: Callable[[], StateReader]) -> None:
        self._interval_s = options.interval_ms / 1e3
        self._new_reader = new_reader
        self._reader = new_reader()
        self._sequence = 0
        self._joined = asyncio.Event()
        self.watchers: set[Watcher] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def join(self, watcher: Watcher) -> None:
        """Somebody watches from now on, and gets a snapshot as soon as it waits for one."""
        self.watchers.add(watcher)
        self._joined.set()

    @property
    def failed(self) -> bool:
        """Whether it makes no more updates, since the state could not be read."""
        return self._task.done()

    def close(self) -> None:
        """Nobody watches any more."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), self._interval_s)
            self._joined.clear()
            try:
                self._update()
            except Exception as failure:
                for watcher in self.watchers:
                    watcher.fail(failure)
                return

    def _update(self) -> None:
        update = self._reader.read()
        wanting = [watcher for watcher in self.watchers if watcher.behind and watcher.waits]
        if update is None and not wanting:
            return
        self._sequence += 1
        if update is not None:
            update.sequence = self._sequence
            for watcher in self.watchers:
                if not watcher.behind:
                    watcher.offer(update)
        if wanting:
            snapshot = update if update is not None and update.snapshot else self._snapshot()
            for watcher in wanting:
                watcher.behind = False
                watcher.offer(snapshot)

    def _snapshot(self) -> pb.WatchStateResponse:
        snapshot = self._new_reader().read()
        assert snapshot is not None  # noqa: S101 - a first look always has something to tell
        snapshot.sequence = self._sequence
        return snapshot


class StateFeeds:
    """Every feed that somebody watches."""

    def __init__(self, engine: CoreView, registry: WorkerRegistry) -> None:
        self._engine = engine
        self._registry = registry
        self._feeds: dict[FeedOptions, Feed] = {}

    def join(self, options: FeedOptions) -> Watcher:
        """Begins to watch."""
        feed = self._feeds.get(options)
        if feed is None or feed.failed:
            feed = Feed(options, lambda: StateReader(self._engine, self._registry, options.steps))
            self._feeds[options] = feed
        watcher = Watcher(feed)
        feed.join(watcher)
        return watcher

    def leave(self, options: FeedOptions, watcher: Watcher) -> None:
        """Ends to watch."""
        feed = watcher.feed
        feed.watchers.discard(watcher)
        if not feed.watchers:
            feed.close()
            if self._feeds.get(options) is feed:
                del self._feeds[options]
