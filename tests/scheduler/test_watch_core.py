"""Looks of a watcher: what they tell adds up to the whole state at each of them, and they move nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from core_harness import MODEL, Harness

from scheduler_service.core import watch as watch_module
from scheduler_service.core.explain import BlockerKind
from scheduler_service.core.queue_tally import QueueKey
from scheduler_service.core.request import Status
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.watch import Changes, Watch

_ALL = 1 << 30


class Mirror:
    """What a watcher makes of the changes."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.rows = {}
        self.queues = {}
        self.heads = {}
        self.hidden = 0

    def look(self, core: Scheduler, now: float) -> Changes:
        changes = core.changes(self.watch, now)
        if changes.from_nothing:
            self.rows, self.queues, self.heads = {}, {}, {}
        for order in changes.ended:
            del self.rows[order]
        for row in changes.requests:
            self.rows[row.order] = row
        columns = changes.progress
        for order, outputs, computed, blocks in zip(
            columns.orders, columns.output_tokens, columns.computed_tokens, columns.blocks, strict=True
        ):
            new = {"output_tokens": outputs, "computed_tokens": computed, "blocks": blocks}
            self.rows[order] = replace(self.rows[order], **new)
        for key, counts in changes.queues.items():
            if counts.empty:
                del self.queues[key]
            else:
                self.queues[key] = (counts.waiting, counts.preempted, counts.running, counts.tokens)
        self.heads |= {head.model: head for head in changes.heads}
        self.hidden = changes.hidden
        return changes

    def assert_equals(self, core: Scheduler, now: float) -> None:
        live = core.requests(now, limit=_ALL)
        shown = live[: watch_module.MOST_SHOWN]
        assert [replace(row, age_s=0.0) for _, row in sorted(self.rows.items())] == [
            replace(row, age_s=0.0) for row in shown
        ]
        assert self.hidden == len(live) - len(shown)
        counted = Counter((QueueKey(r.model, r.tenant, r.priority), r.status) for r in live)
        kinds = (Status.WAITING, Status.PREEMPTED, Status.RUNNING)
        keys = {key for key, _ in counted}
        assert {key: counts[:3] for key, counts in self.queues.items()} == {
            key: tuple(counted[key, kind] for kind in kinds) for key in keys
        }
        assert sum(counts[3] for counts in self.queues.values()) == core.state(now).waiting_tokens


def storm(harness: Harness, seed: int, look=lambda: None) -> None:
    draw = random.Random(seed)
    for i in range(80):
        harness.now += draw.random()
        options = {
            "n": draw.choice([1, 1, 3]),
            "priority": draw.randrange(3),
            "tenant": draw.choice("ab"),
            "queue_timeout_s": draw.choice([None, 3.0]),
        }
        harness.submit(f"r{i}", draw.randint(1, 20), max_tokens=draw.randint(4, 20), **options)
        for worker_id in list(harness.workers):
            harness.plan(worker_id)
            if harness.workers[worker_id].inbox and draw.random() < 0.8:
                harness.answer(worker_id)
        if i % 9 == 4:
            harness.cancel(f"r{draw.randrange(i)}")
        if i % 13 == 6:
            harness.note(harness.core.expire(harness.now))
        if i == 40:
            harness.lose("w0")
            harness.add_worker("w0")
        if draw.random() < 0.7:
            look()
    while harness.core.requests(harness.now):
        for worker_id in list(harness.workers):
            harness.plan(worker_id)
            if harness.workers[worker_id].inbox:
                harness.answer(worker_id)
        look()


def stormy(policy: str) -> Harness:
    return Harness(workers=2, depth=2, num_blocks=25, policy=policy, watermark=0.1, check=False)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
@pytest.mark.parametrize("seed", range(3))
def test_changes_add_up_to_the_state_at_each_look(policy, seed, monkeypatch):
    monkeypatch.setattr(watch_module, "MOST_SHOWN", 12 if seed == 2 else 2_048)
    harness, mirror = stormy(policy), Mirror()
    looks = []

    def look() -> None:
        looks.append(mirror.look(harness.core, harness.now))
        mirror.assert_equals(harness.core, harness.now)

    storm(harness, seed, look)
    counters = harness.core.state(harness.now).counters
    assert counters.preemptions > 0 and counters.requests_moved > 0 and counters.requests_cancelled > 0
    assert [each.from_nothing for each in looks] == [True] + [False] * (len(looks) - 1)
    assert max(each.hidden for each in looks) > 0 or seed != 2
    assert (mirror.rows, mirror.queues) == ({}, {})
    assert mirror.heads[MODEL].request_id == ""


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_nothing_is_moved_by_a_look(policy):
    alone, watched, mirror = stormy(policy), stormy(policy), Mirror()
    storm(alone, 5)
    storm(watched, 5, lambda: mirror.look(watched.core, watched.now))
    assert [str(plan) for plan in watched.plans] == [str(plan) for plan in alone.plans]
    watched.core.check()


def test_what_has_not_changed_is_not_told_again():
    harness, mirror = Harness(max_num_seqs=2), Mirror()
    for i in range(5):
        harness.accept(f"r{i}", 8, max_tokens=9)
    harness.step()
    assert len(mirror.look(harness.core, harness.now).requests) == 5
    again = mirror.look(harness.core, harness.now)
    assert (again.requests, again.ended, again.progress.orders, again.queues, again.heads) == (
        [],
        [],
        [],
        {},
        [],
    )
    harness.step()
    moved = mirror.look(harness.core, harness.now)
    assert (moved.requests, moved.queues, moved.heads) == ([], {}, [])
    assert (moved.progress.orders, moved.progress.output_tokens) == ([0, 1], [2, 2])
    assert moved.progress.computed_tokens == [9, 9]
    harness.cancel("r0")
    harness.cancel("r4")
    gone = mirror.look(harness.core, harness.now)
    assert (gone.requests, gone.ended) == ([], [0, 4])
    mirror.assert_equals(harness.core, harness.now)


def test_the_head_of_a_queue_says_what_it_lacks():
    harness, mirror = Harness(num_blocks=11), Mirror()
    harness.accept("runs", 25, max_tokens=9)
    harness.step()
    harness.accept("waits", 20, max_tokens=4)
    harness.accept("behind", 20, max_tokens=4)
    harness.plan()
    (head,) = mirror.look(harness.core, harness.now).heads
    assert (head.model, head.request_id, head.index) == (MODEL, "waits", 0)
    (blocker,) = head.blockers
    assert blocker.kind is BlockerKind.BLOCKS
    assert (blocker.needed, blocker.available, blocker.limit) == (5, 3, 10)


def test_another_core_is_told_whole():
    first, second, mirror = Harness(), Harness(), Mirror()
    first.accept("a", 4)
    second.accept("b", 4)
    mirror.look(first.core, 0.0)
    assert mirror.look(second.core, 0.0).from_nothing
    assert [row.request_id for row in mirror.rows.values()] == ["b"]


def test_the_block_map_shows_holders_owners_and_what_is_cached():
    harness = Harness(num_blocks=17)
    harness.accept("first", list(range(10)), max_tokens=3)
    harness.run()
    harness.accept("second", [*range(8), 50, 51, 52], max_tokens=9)
    harness.accept("third", [*range(8), 60], max_tokens=9, tenant="t")
    harness.step()
    blocks = harness.core.block_map("w0")
    second, third = harness.core._workers["w0"].running
    assert [(o.request_id, o.tenant, o.order, o.num_blocks) for o in blocks.owners] == [
        ("second", "default", 1, 3),
        ("third", "t", 2, 3),
    ]
    shared = second.block_ids[:2]
    assert third.block_ids[:2] == shared
    assert blocks.holders[shared].tolist() == [2, 2]
    assert blocks.owner_indices[shared].tolist() == [0, 0]
    assert blocks.owner_indices[third.block_ids[2:]].tolist() == [1]
    assert blocks.cached[shared].all()
    state = harness.core.state(0.0).workers[0]
    assert (blocks.holders[1:] > 0).sum() == state.blocks_used
    assert ((blocks.holders[1:] == 0) & blocks.cached[1:]).sum() == state.blocks_cached
    assert (blocks.block_size, len(blocks.holders), blocks.owner_indices[0]) == (4, 17, -1)
