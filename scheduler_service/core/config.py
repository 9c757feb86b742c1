"""Owns the core's options: their defaults, units and ranges."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.core.errors import ConfigError
from scheduler_service.core.policies import POLICIES
from scheduler_service.core.swap import MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of a scheduler.

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """

    max_num_batched_tokens: int = 2048
    """Most tokens in one plan. A worker's own limit applies too."""
    max_num_seqs: int = 256
    """Most candidates on one worker at a time. A worker's slots limit it too."""
    watermark: float = 0.02
    """Share of a worker's blocks that admission leaves free while something runs there."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens that one request gets in a step while others run or wait. 0: no such limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether a request's equal share of the budget, among all that run and wait, counts where it is more."""
    target_itl_ms: float | None = None
    """Milliseconds between a request's tokens that prompts must not exceed by what they add to a step, as
    measured on each worker. None: only max_num_batched_tokens limits a step."""
    max_num_queued_reqs: int | None = None
    """Most candidates that may wait. 0 refuses all, None is no limit."""
    max_num_queued_tokens: int | None = None
    """Most tokens still to be computed of all that wait. An empty queue always takes one request."""
    max_num_queued_reqs_per_tenant: int | None = None
    """The same of each tenant."""
    max_num_queued_tokens_per_tenant: int | None = None
    """The same of each tenant."""
    admission: str = "watermark"
    """When a waiting candidate is let in. `watermark`: where it leaves the watermark free. `predicted`: where
    all that runs can also finish without a preemption, if outputs are as long as each tenant's were."""
    enable_prefix_caching: bool = True
    """Whether blocks of equal prefixes are shared."""
    policy: str = "fcfs"
    """Order of the waiting queue and choice of victims: a name in POLICIES."""
    priority_aging_s: float | None = None
    """Seconds of waiting that are worth one step of priority, under `priority`. None: they do not age."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`. A tenant that is not named has 1."""
    binding: str = "cost"
    """Which worker takes a candidate: the one where it costs the least milliseconds (binding.py). `load` and
    `prefix` are there to compare with: the one that runs the fewest, or holds the longest prefix."""
    pipeline_depth: int = 2
    """Most plans that a worker may have unanswered. A worker's own limit applies too."""
    preemption_mode: str = "auto"
    """What becomes of a preempted candidate's KV. `recompute`: it is dropped, but for what the prefix cache
    still has. `swap`: its worker keeps it in host memory, where that has room. `auto`: what costs less."""
    max_preemptions: int = 8
    """After so many a candidate is a victim only where every other one is in the same case."""
    max_moves_without_progress: int = 5
    """How many workers a candidate may lose without a new token in between; the next loss ends it."""
    overtaking_window: int = 16
    """How many waiting candidates that do not fit are looked past in one plan."""
    max_overtakes: int = 64
    """How often in its life a candidate that does not fit may be overtaken; then nobody passes it."""
    hash_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Secret of the prefix hashes. Fix it where two runs must agree."""

    def __post_init__(self) -> None:
        for option, least in _LEAST.items():
            _check_int(option, getattr(self, option), least)
        for option, least in _LEAST_OR_NONE.items():
            if getattr(self, option) is not None:
                _check_int(option, getattr(self, option), least)
        if not (math.isfinite(self.watermark) and 0 <= self.watermark < 1):
            raise ConfigError("watermark", self.watermark, "a share of the blocks in [0, 1)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            allowed = f"at least max_num_seqs ({self.max_num_seqs}), so that a step can serve each of them"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, allowed)
        if self.policy not in POLICIES:
            raise ConfigError("policy", self.policy, f"one of {', '.join(sorted(POLICIES))}")
        if self.preemption_mode not in MODES:
            raise ConfigError("preemption_mode", self.preemption_mode, ", ".join(MODES))
        if self.binding not in BINDING_RULES:
            raise ConfigError("binding", self.binding, f"one of {', '.join(BINDING_RULES)}")
        if self.admission not in ("watermark", "predicted"):
            raise ConfigError("admission", self.admission, "watermark or predicted")
        if self.target_itl_ms is not None and not _is_positive(self.target_itl_ms):
            raise ConfigError("target_itl_ms", self.target_itl_ms, "milliseconds above 0, or None")
        if self.priority_aging_s is not None and not _is_positive(self.priority_aging_s):
            raise ConfigError("priority_aging_s", self.priority_aging_s, "seconds above 0, or None")
        for tenant, weight in self.tenant_weights.items():
            if not _is_positive(weight):
                raise ConfigError("tenant_weights", f"{tenant}={weight}", "weights above 0")
        if not 1 <= len(self.hash_key) <= 64:
            raise ConfigError("hash_key", f"{len(self.hash_key)} bytes", "1 to 64 bytes")


BINDING_RULES = ("cost", "load", "prefix")

_LEAST = {
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "long_prefill_token_threshold": 0,
    "pipeline_depth": 1,
    "max_preemptions": 0,
    "max_moves_without_progress": 0,
    "overtaking_window": 0,
    "max_overtakes": 0,
}


_LEAST_OR_NONE = {
    "max_num_queued_reqs": 0,
    "max_num_queued_tokens": 1,
    "max_num_queued_reqs_per_tenant": 0,
    "max_num_queued_tokens_per_tenant": 1,
}


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check_int(option: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(option, value, f"a whole number of at least {least}")
