"""Owns one worker's second tier: its host blocks, and what is kept of candidates that it had to preempt.

A kept block has a host block set aside for it, but its contents stay on the device until the pool gives the
device block to someone else: only what would be lost is copied. Knows nothing of policies or of costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler_service.core.request import Request


class KeptBlock:
    """A block of KV of preempted candidates. Its contents are in `device`, or in `host` once that is None."""

    __slots__ = ("device", "holders", "host")

    def __init__(self, device: int, host: int) -> None:
        self.device: int | None = device
        self.host = host
        self.holders = 1  # stashes that it is in


@dataclass(frozen=True, slots=True, eq=False)
class Stash:
    """What is kept of a preempted candidate: KV of its first `num_computed` tokens."""

    blocks: tuple[KeptBlock, ...]
    num_computed: int


class HostTier:
    """Host blocks 0 to num_blocks - 1 of one worker, and the stashes that they are for."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stashes: dict[Request, Stash] = {}
        self.watched: dict[int, KeptBlock] = {}  # by device block, while the contents are there
        self._free = list(range(num_blocks - 1, -1, -1))
        self._copies: dict[int, int] = {}  # host block -> device block that the next plan copies to it
        self._leaving: list[int] = []  # read by the plan in the making: free once that is sent

    @property
    def num_free(self) -> int:
        """Host blocks that are set aside for nothing."""
        return len(self._free) + len(self._leaving)

    def count_needed(self, blocks: Iterable[int]) -> int:
        """Host blocks that keeping these device blocks takes. Those that another stash has take none."""
        return sum(1 for block in blocks if block not in self.watched)

    def has_room(self, blocks: Iterable[int]) -> bool:
        """Whether these device blocks can be kept now."""
        return self.count_needed(blocks) <= len(self._free)

    def keep(self, request: Request, blocks: Sequence[int], num_computed: int) -> None:
        """Keeps a candidate's leading blocks, which hold `num_computed` tokens by the time that the next plan
        is executed. The caller has seen that there is room."""
        kept = []
        for block in blocks:
            known = self.watched.get(block)
            if known is None:
                known = self.watched[block] = KeptBlock(block, self._free.pop())
            else:
                known.holders += 1
            kept.append(known)
        request.stash = self.stashes[request] = Stash(tuple(kept), num_computed)

    def note_taken(self, blocks: Iterable[int]) -> None:
        """Device blocks are given to someone else: the next plan first copies what is kept in them."""
        for block in blocks:
            kept = self.watched.pop(block, None)
            if kept is not None:
                kept.device = None
                self._copies[kept.host] = block

    def drop(self, request: Request, reads: Collection[int] = ()) -> None:
        """Forgets what is kept of a candidate. The next plan still reads the host blocks `reads`."""
        stash = self.stashes.pop(request)
        request.stash = None
        for kept in stash.blocks:
            kept.holders -= 1
            if kept.holders:
                continue
            if kept.device is not None:
                del self.watched[kept.device]
                self._free.append(kept.host)
            elif kept.host in reads:
                self._leaving.append(kept.host)
            else:
                self._copies.pop(kept.host, None)
                self._free.append(kept.host)

    def drop_all(self) -> None:
        """Forgets all that is kept."""
        for request in list(self.stashes):
            self.drop(request)

    def take_copies(self) -> tuple[list[int], list[int]]:
        """Device blocks and the host blocks that a plan copies them to. It counts as sent."""
        hosts, devices = list(self._copies), list(self._copies.values())
        self._copies.clear()
        self._free += self._leaving
        self._leaving.clear()
        return devices, hosts

    def states(self) -> list[int]:
        """Of each host block: 0 is free, 1 set aside for what the device still has, 2 has KV or soon has."""
        states = [0] * self.num_blocks
        for stash in self.stashes.values():
            for kept in stash.blocks:
                states[kept.host] = 2 if kept.device is None else 1
        return states

    def violations(self) -> list[str]:
        """Every way in which the tier contradicts itself."""
        found = []
        holders: dict[KeptBlock, int] = {}
        for stash in self.stashes.values():
            for kept in stash.blocks:
                holders[kept] = holders.get(kept, 0) + 1
        if any(kept.holders != count for kept, count in holders.items()):
            found.append("a kept block's holders are not the stashes that it is in")
        used = [kept.host for kept in holders]
        if sorted(used + self._free + self._leaving) != list(range(self.num_blocks)):
            found.append(f"{len(used)} host blocks in use and {self.num_free} free are not {self.num_blocks}")
        if self.watched != {kept.device: kept for kept in holders if kept.device is not None}:
            found.append("the watched device blocks are not those of kept blocks")
        if not self._copies.keys() <= {kept.host for kept in holders if kept.device is None}:
            found.append("a copy is due to a host block that is kept for nobody")
        if self._leaving:
            found.append("host blocks are leaving between two plans")
        return found


def let_go(request: Request, reads: Collection[int] = ()) -> None:
    """Forgets what is kept of a candidate, wherever that is. The next plan still reads the host blocks
    `reads`."""
    if request.stash is not None and request.last_worker is not None:
        request.last_worker.host.drop(request, reads)
