"""Owns the list of policies that the option `policy` can name."""

from __future__ import annotations

from scheduler_service.core.policies.deadline import Deadline
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.policies.fcfs import Fcfs
from scheduler_service.core.policies.priority import Priority
from scheduler_service.core.policy import Policy

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Fcfs, Priority, Fair, Deadline)}
"""Every policy by its name."""
