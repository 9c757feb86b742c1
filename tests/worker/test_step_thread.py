"""The step thread's order of work, on executors that do and do not overlap with the host."""

import threading
from types import SimpleNamespace

import pytest

from worker_service.step_thread import Lease, StepThread


class FakeExecutor:
    """Writes down what is asked of it. Its first launch waits for `go`, so that plans can queue up."""

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.log: list[str] = []
        self.go = threading.Event()

    def launch(self, plan):
        assert self.go.wait(30)
        self.log.append(f"launch {plan.seq}")
        if plan.seq < 0:
            raise ValueError(plan.seq)
        return plan

    def collect(self, plan):
        self.log.append(f"collect {plan.seq}")
        if plan.seq == 13:
            raise ValueError(plan.seq)
        return plan.seq

    def reset(self):
        self.log.append("reset")


class Harness:
    def __init__(self, overlaps: bool) -> None:
        self.executor = FakeExecutor(overlaps)
        self.thread = StepThread(self.executor, num_threads=1)
        self.lease = Lease()
        self.delivered: list[object] = []

    def submit(self, *seqs: int, lease: Lease | None = None) -> None:
        for seq in seqs:
            self.thread.submit(lease or self.lease, SimpleNamespace(seq=seq), self.delivered.append)

    def finish(self) -> list[str]:
        self.executor.go.set()
        self.thread.close().result(30)
        return self.executor.log


def test_without_overlap_each_step_ends_before_the_next_begins():
    harness = Harness(overlaps=False)
    harness.submit(1, 2)
    assert harness.finish() == ["launch 1", "collect 1", "launch 2", "collect 2"]
    assert harness.delivered == [1, 2]


def test_with_overlap_the_next_step_is_launched_first():
    harness = Harness(overlaps=True)
    harness.submit(1, 2, 3)
    assert harness.finish() == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]
    assert harness.delivered == [1, 2, 3]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_lone_step_is_collected_without_a_next_one(overlaps):
    harness = Harness(overlaps)
    arrived = threading.Event()
    harness.thread.submit(harness.lease, SimpleNamespace(seq=1), lambda _: arrived.set())
    harness.executor.go.set()
    assert arrived.wait(30)
    harness.finish()


@pytest.mark.parametrize("overlaps", [False, True])
def test_reset_comes_after_steps_in_flight(overlaps):
    harness = Harness(overlaps)
    harness.submit(1)
    done = harness.thread.reset()
    harness.submit(2, lease=Lease())
    log = harness.finish()
    assert done.done()
    assert log == ["launch 1", "collect 1", "reset", "launch 2", "collect 2"]


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_of_an_ended_lease_are_dropped(overlaps):
    harness = Harness(overlaps)
    harness.submit(1, 2)
    harness.lease.ended = True  # the thread may have taken the first plan by now
    harness.submit(3, lease=Lease())
    log = harness.finish()
    assert "launch 2" not in log
    assert harness.delivered[-1] == 3


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("bad", [-2, 13])
def test_a_failure_is_delivered_in_order_and_ends_the_lease(bad, overlaps):
    harness = Harness(overlaps)
    harness.submit(1, bad)
    harness.executor.go.set()
    harness.thread.reset().result(30)
    assert harness.delivered[0] == 1
    assert isinstance(harness.delivered[1], ValueError)
    assert harness.lease.ended
    harness.submit(4)
    harness.submit(5, lease=Lease())
    harness.finish()
    assert harness.delivered[2:] == [5]


def test_the_thread_outlives_a_stream_that_does_not_wait_for_its_reset():
    harness = Harness(overlaps=False)
    harness.submit(1)
    assert harness.thread.reset().cancel()
    harness.submit(2)
    assert harness.finish() == ["launch 1", "collect 1", "reset", "launch 2", "collect 2"]


def test_close_is_done_after_the_last_delivery():
    harness = Harness(overlaps=True)
    delivered_at_close: list[int] = []
    harness.submit(1, 2)
    closed = harness.thread.close()
    closed.add_done_callback(lambda _: delivered_at_close.extend(harness.delivered))
    assert not closed.done()
    harness.executor.go.set()
    closed.result(30)
    assert delivered_at_close == [1, 2]
