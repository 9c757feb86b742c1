"""BlockPool: free list order, reference counts, the prefix index; and a state machine over all of it."""

from __future__ import annotations

import pytest
from core_harness import MACHINE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.block_pool import BlockPool


def h(i: int) -> bytes:
    return i.to_bytes(16, "little")


def test_a_new_pool_gives_blocks_in_order_and_never_the_null_block():
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_more_than_is_free_changes_nothing():
    pool = BlockPool(5)
    pool.allocate(3)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.free_blocks() == [4]


def test_unhashed_blocks_are_reused_first_and_last_freed_first():
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.release(blocks)  # tail first: 3, 2, 1, each to the front
    assert pool.free_blocks() == [1, 2, 3, 4, 5]


def test_hashed_blocks_go_to_the_lru_end_with_the_tail_evicted_first():
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.register(blocks, [h(1), h(2), h(3)])
    pool.release(blocks)
    assert pool.free_blocks() == [4, 5, 3, 2, 1]
    assert pool.num_free_hashed == 3


def test_mixed_table_frees_its_unhashed_tail_to_the_front():
    pool = BlockPool(11)
    blocks = pool.allocate(5)
    pool.register(blocks[:3], [h(1), h(2), h(3)])
    pool.release(blocks)
    assert pool.free_blocks() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


def test_lookup_returns_the_longest_run_from_the_start():
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.register(blocks, [h(1), h(2), h(3)])
    assert pool.lookup([h(1), h(2), h(9), h(3)], 4) == blocks[:2]
    assert pool.lookup([h(9), h(1)], 2) == []
    assert pool.lookup([h(1), h(2), h(3)], 1) == blocks[:1]


def test_a_free_block_keeps_its_prefix_until_it_is_taken():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.register(blocks, [h(1), h(2)])
    pool.release(blocks)
    assert pool.lookup([h(1), h(2)], 2) == blocks
    assert pool.allocate(2) == [3, 2]  # 2 held the tail of the prefix
    assert pool.lookup([h(1), h(2)], 2) == blocks[:1]


def test_sharing_takes_a_block_off_the_free_list():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.register(blocks, [h(1)])
    pool.release(blocks)
    assert pool.count_free(blocks) == 1
    pool.share(blocks)
    assert pool.count_free(blocks) == 0
    assert pool.free_blocks() == [2, 3]
    assert pool.num_free_hashed == 0


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.count_unshared(blocks) == 1
    pool.release(blocks)
    assert pool.num_free == 3


def test_the_first_block_of_a_prefix_keeps_its_name():
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.register([first], [h(1)])
    pool.register([second], [h(1)])
    assert pool.lookup([h(1)], 1) == [first]
    pool.release([second])
    assert pool.free_blocks()[0] == second


def test_a_hit_moves_a_block_to_the_end_of_the_eviction_order_when_freed_again():
    pool = BlockPool(4)
    for i in (1, 2, 3):
        (block,) = pool.allocate(1)
        pool.register([block], [h(i)])
        pool.release([block])
    assert pool.free_blocks() == [1, 2, 3]
    pool.share([1])
    pool.release([1])
    assert pool.free_blocks() == [2, 3, 1]


def test_reset_forgets_free_blocks_only():
    pool = BlockPool(5)
    used, free = pool.allocate(2)
    pool.register([used, free], [h(1), h(2)])
    pool.release([free])
    assert pool.reset_cache() == 1
    assert pool.lookup([h(1)], 1) == [used]
    assert pool.lookup([h(2)], 1) == []
    assert pool.num_free_hashed == 0


def test_violations_tell_a_wrong_count():
    pool = BlockPool(4)
    pool.allocate(1)
    assert pool.violations([0, 1, 0, 0]) == []
    assert "reference counts of blocks [1]" in pool.violations([0, 0, 0, 0])[0]


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model that keeps the free list as a plain list."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = list(range(1, num_blocks))
        self.names: dict[int, bytes] = {}
        self.tables: list[list[int]] = []
        self.num_names = 0

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, len(self.free)))
        taken = self.pool.allocate(count)
        assert taken == self.free[:count]
        del self.free[:count]
        for block in taken:
            self.names.pop(block, None)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            if any(block in other for other in self.tables):
                continue
            if block in self.names:
                self.free.append(block)
            else:
                self.free.insert(0, block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), fresh=st.booleans())
    def register(self, data, fresh):
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        if block in self.names:
            return
        if fresh or not self.num_names:
            self.num_names += 1
        name = h(self.num_names)
        self.pool.register([block], [name])
        if name not in self.names.values():
            self.names[block] = name

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hit(self, data):
        block = data.draw(st.sampled_from(sorted(self.names)))
        assert self.pool.lookup([self.names[block]], 1) == [block]
        assert self.pool.count_free([block]) == (block in self.free)
        self.pool.share([block])
        if block in self.free:
            self.free.remove(block)
        self.tables.append([block])

    @rule()
    def reset(self):
        cached = [block for block in self.free if block in self.names]
        assert self.pool.reset_cache() == len(cached)
        for block in cached:
            del self.names[block]

    @invariant()
    def holds(self):
        if not hasattr(self, "pool"):
            return
        refs = [sum(table.count(b) for table in self.tables) for b in range(self.pool.num_blocks)]
        assert self.pool.violations(refs) == []
        assert self.pool.free_blocks() == self.free
        assert self.pool.num_free == len(self.free)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(MACHINE, stateful_step_count=30)
