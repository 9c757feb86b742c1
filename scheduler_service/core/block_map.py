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
    """A candidate that runs."""

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


def block_map(worker: Worker) -> BlockMap:
    """The blocks of a worker as they are now."""
    holders, cached = worker.pool.columns()
    indices = np.full(len(holders), -1, np.int32)
    for index in range(len(worker.running) - 1, -1, -1):
        indices[worker.running[index].block_ids] = index
    owners = tuple(_owner(request) for request in worker.running)
    return BlockMap(holders, cached, indices, owners, worker.spec.block_size)


def _owner(request: Request) -> Owner:
    tenant, held = request.spec.tenant, len(request.block_ids)
    return Owner(request.request_id, request.index, tenant, request.order, held)
