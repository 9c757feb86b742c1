"""Owns the picture of one worker's blocks that operators see. It moves nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.request import Request
from scheduler_service.core.step import Int32
from scheduler_service.core.worker import Worker


@dataclass(frozen=True, slots=True)
class Owner:
    """A candidate that runs, or whose KV is kept in host memory."""

    request_id: str
    index: int
    tenant: str
    order: int  # of arrival
    num_blocks: int  # shared ones among them


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Columns over all blocks by their ids, and the candidates on board."""

    holders: Int32  # [blocks] how many hold it
    cached: NDArray[np.bool_]  # [blocks] whether its prefix can be hit
    owner_indices: Int32  # [blocks] place in `owners` of the first that holds it, -1 for none
    owners: tuple[Owner, ...]  # in order of admission
    block_size: int  # tokens
    host_states: tuple[int, ...]  # of host blocks by their ids, see HostTier.states()
    host_owner_indices: Int32  # [host blocks] place in `host_owners` of the first that it is kept for, or -1
    host_owners: tuple[Owner, ...]  # preempted candidates whose KV is kept, in the order in which they left


def block_map(worker: Worker) -> BlockMap:
    """The blocks of a worker as they are now."""
    holders, cached = worker.pool.columns()
    indices = np.full(len(holders), -1, np.int32)
    for index in range(len(worker.running) - 1, -1, -1):
        indices[worker.running[index].block_ids] = index
    owners = tuple(_owner(request, len(request.block_ids)) for request in worker.running)
    host = worker.host
    host_indices = np.full(host.num_blocks, -1, np.int32)
    stashes = list(host.stashes.items())
    for index in range(len(stashes) - 1, -1, -1):
        host_indices[[kept.host for kept in stashes[index][1].blocks]] = index
    host_owners = tuple(_owner(request, len(stash.blocks)) for request, stash in stashes)
    states = tuple(host.states())
    return BlockMap(
        holders, cached, indices, owners, worker.spec.block_size, states, host_indices, host_owners
    )


def _owner(request: Request, num_blocks: int) -> Owner:
    return Owner(request.request_id, request.index, request.spec.tenant, request.order, num_blocks)
