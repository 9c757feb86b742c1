"""Owns the KV blocks of one worker: which are free, how often each is used, which prefix each one holds.

Free blocks form a doubly linked list in eviction order. A free block keeps its hash until it is taken for
something else, so a prefix stays cached as long as memory allows. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
"""Never given out: tables are padded with it. It doubles as both ends of the free list."""


class BlockPool:
    """Reference counts, free list and prefix index of blocks 1 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_free_hashed = 0
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    def lookup(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Blocks that hold the longest cached run of `hashes`, at most `most` of them. Takes nothing."""
        found: list[int] = []
        block_of = self._block_of
        for index in range(min(most, len(hashes))):
            block = block_of.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def holders_of(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold any of `hashes`, whatever comes before them. Takes nothing."""
        block_of = self._block_of
        return [block_of[block_hash] for block_hash in hashes if block_hash in block_of]

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free list: taking them uses up free blocks."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def count_unshared(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` become free when one holder lets go of them."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 1)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, taking it off the free list where it was there."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
                self.num_free -= 1
                if self._hash_of[block] is not None:
                    self.num_free_hashed -= 1
            refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks from the head of the free list; what they cached is forgotten.

        The caller has seen that num_free suffices.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        taken = []
        following, refs, hash_of = self._next, self._refs, self._hash_of
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            cached = hash_of[block]
            if cached is not None:
                hash_of[block] = None
                del self._block_of[cached]
                self.num_free_hashed -= 1
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def release(self, blocks: Sequence[int], kept: Container[int] = ()) -> None:
        """Drops a reference to each block of a table, from its tail.

        Blocks that become free go to the end of the list if they hold a prefix or are in `kept`, so that the
        longest unused is evicted first and a prefix's tail before its head; others go to the front, to be
        used next.
        """
        refs, hash_of = self._refs, self._hash_of
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            self.num_free += 1
            if hash_of[block] is None and block not in kept:
                self._link(block, NULL_BLOCK, self._next[NULL_BLOCK])
            else:
                self.num_free_hashed += hash_of[block] is not None
                self._link(block, self._prev[NULL_BLOCK], NULL_BLOCK)

    def register(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Names the prefixes that blocks in use hold.

        The first block of a name keeps it: a second one with the same contents stays nameless, so that it is
        the first to be reused when freed.
        """
        block_of, hash_of = self._block_of, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_of.setdefault(block_hash, block) == block:
                hash_of[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> int:
        """Forgets what `blocks` cache; returns how many cached something."""
        forgotten = 0
        for block in blocks:
            cached = self._hash_of[block]
            if cached is not None:
                self._hash_of[block] = None
                del self._block_of[cached]
                forgotten += 1
                if self._refs[block] == 0:
                    self.num_free_hashed -= 1
        return forgotten

    def reset_cache(self) -> int:
        """Forgets the prefixes of free blocks; returns how many blocks that were."""
        return self.forget(self.free_blocks())

    def free_blocks(self) -> list[int]:
        """The free list, the next to be taken first."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Of every block: how many hold it, and whether its prefix can be hit."""
        return np.array(self._refs, np.int32), np.array([name is not None for name in self._hash_of])

    def _link(self, block: int, before: int, after: int) -> None:
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def violations(self, expected_refs: Sequence[int]) -> list[str]:
        """Every way in which the pool contradicts itself or the reference counts that tables imply."""
        found = []
        if list(expected_refs) != self._refs:
            wrong = [b for b, (a, e) in enumerate(zip(self._refs, expected_refs, strict=True)) if a != e]
            found.append(f"reference counts of blocks {wrong[:8]} differ from the tables'")
        free = self._walk()
        if sorted(free) != [b for b in range(1, self.num_blocks) if self._refs[b] == 0]:
            found.append("the free list is not the set of blocks without references")
        if self.num_free != len(free):
            found.append(f"num_free is {self.num_free}, the free list has {len(free)}")
        if self.num_free_hashed != sum(self._hash_of[b] is not None for b in free):
            found.append(f"num_free_hashed is {self.num_free_hashed}, which the free list contradicts")
        if self._refs[NULL_BLOCK] or self._hash_of[NULL_BLOCK] is not None:
            found.append("the null block is in use")
        named = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        if named != self._block_of:
            found.append("the prefix index and the blocks' hashes differ")
        return found

    def _walk(self) -> list[int]:
        """The free list read forwards, cut where a cycle or a broken back link shows."""
        blocks: list[int] = []
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) < self.num_blocks and self._prev[block] == before:
            blocks.append(block)
            before, block = block, self._next[block]
        return blocks
