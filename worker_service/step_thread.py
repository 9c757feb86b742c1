"""Owns the one thread that executes plans, in the order in which they were handed over.

Imports no torch before the thread runs, so that the process can listen before that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker_service.plan import Plan, Result

if TYPE_CHECKING:
    from worker_service.executor import Executor, LaunchedStep

# Told what became of a plan, on the step thread: a result, or the exception that it raised.
Deliver = Callable[[Result | Exception], None]


class Lease:
    """The right of one stream to have plans executed. Once ended, its queued plans are dropped."""

    def __init__(self) -> None:
        self.ended = False


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    lease: Lease
    plan: Plan
    deliver: Deliver


class StepThread:
    """Executes one plan after the other, and resets the executor between streams."""

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self.executor = executor
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[_Job | Future[None] | None] = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def submit(self, lease: Lease, plan: Plan, deliver: Deliver) -> None:
        """Queues a plan. Nothing is delivered once the lease has ended before the plan's turn."""
        self._jobs.put(_Job(lease, plan, deliver))

    def reset(self) -> Future[None]:
        """Empties every slot once all that was queued before is executed or dropped."""
        done: Future[None] = Future()
        self._jobs.put(done)
        return done

    def close(self) -> Future[None]:
        """Ends the thread after what is queued. Done once nothing more will be delivered."""
        self._jobs.put(None)
        return self._closed

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._num_threads)  # OpenMP keeps this number for each calling thread
        launched: tuple[_Job, LaunchedStep | Exception] | None = None
        while True:
            # On a GPU the next plan is launched before this one's tokens are waited for, if it is here.
            if launched is not None and (self._jobs.empty() or not self.executor.overlaps):
                self._finish(*launched)
                launched = None
                continue
            item = self._jobs.get()
            previous, launched = launched, None
            if isinstance(item, _Job) and not item.lease.ended:
                launched = (item, self._launch(item))
            if previous is not None:
                self._finish(*previous)
            if item is None:
                _complete(self._closed)
                return
            if isinstance(item, Future):
                self.executor.reset()
                _complete(item)

    def _launch(self, job: _Job) -> LaunchedStep | Exception:
        try:
            return self.executor.launch(job.plan)
        except Exception as error:  # whatever it is, it ends a stream and never the thread
            job.lease.ended = True
            return error

    def _finish(self, job: _Job, step: LaunchedStep | Exception) -> None:
        outcome: Result | Exception
        try:
            outcome = step if isinstance(step, Exception) else self.executor.collect(step)
        except Exception as error:  # as above
            job.lease.ended = True
            outcome = error
        job.deliver(outcome)


def _complete(future: Future[None]) -> None:
    """Tells whoever waits. A stream that was cancelled waits no more, and its future takes no result."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)
