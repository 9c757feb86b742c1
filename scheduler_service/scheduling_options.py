"""Owns the options of scheduling: limits, policies, and the configuration of the core that they make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode

from scheduler_service.core.config import SchedulerConfig


class SchedulingOptions(BaseSettings):
    """Options of the service that the core decides by."""

    max_num_batched_tokens: int = Field(
        2048, ge=1, le=1_048_576, description="Most tokens that one step of a worker computes (tokens)."
    )
    max_num_seqs: int = Field(
        256, ge=1, le=65_536, description="Most requests on a worker at a time (requests)."
    )
    watermark: float = Field(
        0.02, ge=0, lt=1, description="Share of a worker's KV blocks to keep free at admission (0 up to 1)."
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most prompt tokens of one request in a step while others wait (tokens; 0: off)."
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        False, description="Raise that threshold to a request's equal share of the step, where it is more."
    )
    target_itl_ms: float = Field(
        0.0,
        ge=0,
        le=3_600_000,
        description="Time between a request's tokens that long prompts of others must not exceed; each step "
        "then takes as many prompt tokens as that allows, by what the worker's steps took (ms; 0: off).",
    )
    max_num_queued_reqs: int | None = Field(
        None,
        ge=0,
        description="Most waiting requests, those included whose prompts are being read; more are refused "
        "(requests; unset: no limit).",
    )
    max_num_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Most prompt tokens of waiting requests; one that has more is taken where none waits "
        "(tokens; unset: no limit).",
    )
    max_num_queued_reqs_per_tenant: int | None = Field(
        None, ge=0, description="Most waiting requests of one tenant (requests; unset: no limit)."
    )
    max_num_queued_tokens_per_tenant: int | None = Field(
        None, ge=1, description="Most prompt tokens of a tenant's waiting requests (tokens; unset: no limit)."
    )
    admission: Literal["watermark", "predicted"] = Field(
        "watermark",
        description="Let a request in where the watermark stays free; or where, by how long each tenant's "
        "outputs were, all that runs can also finish without a preemption.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of equal prompt beginnings.")
    scheduling_policy: Literal["fcfs", "priority", "fair", "deadline"] = Field(
        "fcfs",
        description="Order of the queue: by arrival; by priority, then arrival; the tenant that was served "
        "least; the earliest deadline, where what can't meet its own is refused.",
    )
    priority_aging_s: float | None = Field(
        None, gt=0, description="Waiting that is worth one step of priority (seconds; unset: no aging)."
    )
    tenant_weights: Annotated[dict[str, float], NoDecode] = Field(
        {}, description="Shares under the policy fair, as TENANT=WEIGHT, separated by commas; others have 1."
    )
    pipeline_depth: int = Field(
        2, ge=1, le=16, description="Most unanswered plans at a worker; 2 hides the network (plans)."
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="KV of preempted requests. recompute: dropped; swap: kept in host memory where the "
        "worker has room there; auto: whichever costs less by measured times.",
    )
    max_preemptions: int = Field(
        8, ge=0, description="Preemptions after which a request is spared while others can go (preemptions)."
    )
    max_moves_without_progress: int = Field(
        5, ge=0, description="Most workers that a request may lose without a token in between (workers)."
    )

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _split_weights(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return dict(part.strip().rpartition("=")[::2] for part in value.split(",") if part.strip())

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, value: dict[str, float]) -> dict[str, float]:
        for tenant, weight in value.items():
            if not tenant or not 0 < weight < float("inf"):
                raise ValueError(f"{tenant}={weight:g}: it must be TENANT=WEIGHT with a weight above 0")
        return value

    def check_scheduling(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: a step gives each running request at least one token; raise the first "
                "or lower the second"
            )
        for option, policy in (("tenant_weights", "fair"), ("priority_aging_s", "priority")):
            value = getattr(self, option)
            if value and self.scheduling_policy != policy:
                raise ValueError(
                    f"{option} = {value} is only for scheduling_policy = {policy}, but that is "
                    f"{self.scheduling_policy}; set the policy, or leave the option out"
                )
        for option in ("max_num_queued_reqs", "max_num_queued_tokens"):
            every, each = getattr(self, option), getattr(self, f"{option}_per_tenant")
            if every is not None and each is not None and each > every:
                raise ValueError(
                    f"{option}_per_tenant = {each} is more than {option} = {every}, so it would never apply; "
                    "lower the first or raise the second"
                )

    def to_core(self) -> SchedulerConfig:
        """The part that the core needs."""
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            target_itl_ms=self.target_itl_ms or None,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            max_num_queued_reqs_per_tenant=self.max_num_queued_reqs_per_tenant,
            max_num_queued_tokens_per_tenant=self.max_num_queued_tokens_per_tenant,
            admission=self.admission,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            priority_aging_s=self.priority_aging_s,
            tenant_weights=self.tenant_weights,
            pipeline_depth=self.pipeline_depth,
            preemption_mode=self.preemption_mode,
            max_preemptions=self.max_preemptions,
            max_moves_without_progress=self.max_moves_without_progress,
        )
