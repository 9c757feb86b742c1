"""What tests of swapping have in common: two requests on little memory, and what was copied of them."""

from __future__ import annotations

from core_harness import Harness

from scheduler_service.core.events import Preempted


def events(h: Harness, name: str, kind: type, index: int = 0) -> list:
    return [event for event in h.seen[name, index].events if isinstance(event, kind)]


def step_until(h: Harness, condition) -> None:
    for _ in range(300):
        if condition():
            return
        assert h.step() is not None
    raise AssertionError("it never came")


def swapped(h: Harness) -> tuple[int, int]:
    """Blocks that were copied out and in."""
    counters = h.core.state(h.now).counters
    return counters.swapped_out_blocks, counters.swapped_in_blocks


def host_used(h: Harness, worker_id: str = "w0") -> int:
    states = {state.worker_id: state for state in h.core.state(h.now).workers}
    return states[worker_id].host_blocks_used


def two_on_little_memory(scale: int = 1, **options: object) -> Harness:
    """Two requests that need 5 of 6 blocks each in the end. `scale` makes everything longer."""
    options = {"num_host_blocks": 8, "preemption_mode": "swap", **options}
    h = Harness(num_blocks=7, block_size=4 * scale, **options)
    h.accept("a", 7 * scale, 12 * scale, priority=0)
    h.accept("b", 8 * scale, 12 * scale, priority=1)
    return h


def until_preempted(h: Harness, name: str = "b") -> Preempted:
    step_until(h, lambda: events(h, name, Preempted))
    return events(h, name, Preempted)[0]
