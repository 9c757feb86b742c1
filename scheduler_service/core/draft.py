"""Owns a plan in the making: the rows and blocks that are decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.request import Request
from scheduler_service.core.step import Admission, Int32
from scheduler_service.core.step_budget import StepBudget
from scheduler_service.core.worker import Int64


@dataclass(slots=True)
class Draft:
    """Rows of running candidates as columns, then those of admitted ones one by one."""

    rows: Int64  # slots
    rows32: Int32
    requests: list[Request]
    grants: Int64  # tokens for each row
    block_rows: list[int]
    block_ids: list[int]
    budget: StepBudget  # what is left of it
    preempted: bool = False
    admitted: list[Request] = field(default_factory=list)
    admitted_grants: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    swap_in_host_blocks: list[int] = field(default_factory=list)
    swap_in_blocks: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Joins the admitted candidates' rows to the others."""
        if self.admitted:
            slots = np.array([request.slot for request in self.admitted], np.int64)
            self.rows = np.concatenate((self.rows, slots))
            self.rows32 = self.rows.astype(np.int32)
            self.requests = self.requests + self.admitted
            self.grants = np.concatenate((self.grants, np.array(self.admitted_grants, np.int64)))
