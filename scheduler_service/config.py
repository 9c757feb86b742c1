"""Owns the options of the scheduler service: names, units, defaults, ranges, presets, and their sources.

Precedence: flags, then TIDEGATE_* variables, then the configuration file, then the preset, then defaults.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from scheduler_service.addresses import check_address
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.journal_options import JournalOptions
from scheduler_service.security_options import SecurityOptions

_ENV_PREFIX = "TIDEGATE_"

PRESETS: dict[str, dict[str, Any]] = {
    "concurrency": {
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 256,
        "max_num_queued_reqs": 512,
        "scheduling_policy": "priority",
    },
    "long-context": {
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 64,
        "long_prefill_token_threshold": 8192,
    },
}


class ConfigError(Exception):
    """Options that cannot be used. The message has one line for each, for whoever started the service."""


class ServiceConfig(JournalOptions, SecurityOptions):
    """Runs the scheduler service. Each option is also an environment variable (TIDEGATE_ and its name in
    capitals) and a key of the --config file. Flags win over variables, then come the file and the preset."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        cli_prog_name="python -m scheduler_service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    config: Path | None = Field(None, description="File of options, YAML or TOML, with these names as keys.")
    preset: Literal["concurrency", "long-context"] | None = Field(
        None,
        description="Values from practice; explicit ones win. concurrency: 16384 batched tokens, 256 seqs, "
        "512 queued, priority. long-context: 4096 batched tokens, 64 seqs, prefill threshold 8192.",
    )

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
    default_max_tokens: int = Field(
        1024, ge=1, description="Most tokens to generate where a request does not say (tokens)."
    )
    queue_timeout: float = Field(
        60.0, gt=0, le=86_400, description="Longest wait in the queue where a request does not say (seconds)."
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65_535, description="Port to listen on (0: any free one).")
    admin_host: str | None = Field(None, description="Address of the admin API (unset: same as host).")
    admin_port: int | None = Field(
        None, ge=0, le=65_535, description="Port of the admin API (unset: it shares the public port)."
    )
    frontends: int = Field(
        0,
        ge=0,
        le=128,
        description="Processes that serve clients; 0: the scheduler's own. They need admin_port (processes).",
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Address of the metrics for Prometheus.")
    metrics_port: int | None = Field(
        None, ge=0, le=65_535, description="Port of the metrics for Prometheus, at /metrics (unset: none)."
    )
    console_host: str = Field("127.0.0.1", min_length=1, description="Address of the console page.")
    console_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="Port of the console, a page of the live state, with the access rules of the admin API "
        "(unset: none).",
    )
    ready_file: Path | None = Field(
        None, description="File to write with the bound ports, as JSON, once the service listens."
    )

    worker: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="A worker's host:port. Repeat it, or separate by commas. Workers can also register."
    )
    worker_step_timeout: float = Field(
        60.0,
        gt=0,
        le=3_600,
        description="Longest time for a step before its worker counts as hung (seconds).",
    )
    worker_hello_timeout: float = Field(
        10.0, gt=0, le=600, description="Longest time for a worker to answer a new stream (seconds)."
    )
    worker_backoff_max: float = Field(
        5.0, ge=0.05, le=300, description="Longest pause between attempts to reach a worker (seconds)."
    )

    drain_window: float = Field(
        2.0, ge=0, le=300, description="Time that health says no while requests are still taken (seconds)."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=86_400, description="Longest time for requests to finish after SIGTERM (seconds)."
    )

    record: Path | None = Field(
        None,
        description="File for what the scheduler is told and decides, for `tidegate replay`; no text in it.",
    )
    record_tokens: bool = Field(
        False, description="Write tokens to that file as they are, and not what only tells prefixes apart."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe events that are logged."
    )
    log_format: Literal["json", "console"] = Field("console", description="Shape of log lines.")

    @field_validator("worker", mode="before")
    @classmethod
    def _split_workers(cls, value: Any) -> Any:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
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

    @field_validator("worker")
    @classmethod
    def _check_workers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            check_address(address)
        if len(set(value)) < len(value):
            raise ValueError("an address is there twice")
        return value

    @model_validator(mode="after")
    def _check_contradictions(self) -> ServiceConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: a step gives each running request at least one token; raise the first "
                "or lower the second"
            )
        self._check_policy_options()
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError("admin_host is set but admin_port is not; set both, or neither")
        if self.frontends and self.admin_port is None:
            raise ValueError(
                f"frontends is {self.frontends} and admin_port is not set: clients' connections go to other "
                "processes than the admin API's, so that needs a port of its own"
            )
        admin_host = None if self.admin_port is None else self.admin_host or self.host
        self.check_journal()
        console_host = None if self.console_port is None else self.console_host
        self.check_security(self.host, admin_host, self.worker, console_host)
        return self

    def _check_policy_options(self) -> None:
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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Init arguments (flags come before them), environment, file, preset."""
        return init_settings, env_settings, _FileSource(settings_cls), _PresetSource(settings_cls)

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


def load_config(argv: Sequence[str]) -> ServiceConfig:
    """The options from flags, environment, file and preset. Raises ConfigError; exits for --help."""
    flags = [_flag_spelling(argument) for argument in argv]
    try:
        return ServiceConfig(_cli_parse_args=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


class _FileSource(PydanticBaseSettingsSource):
    """Options from the file that `config` names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("values come whole, from __call__")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return {} if path is None else _read_file(Path(path))


class _PresetSource(PydanticBaseSettingsSource):
    """Options from the preset."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("values come whole, from __call__")

    def __call__(self) -> dict[str, Any]:
        return dict(PRESETS.get(self.current_state.get("preset", ""), {}))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    try:
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.safe_load(text) or {}
        else:
            raise ConfigError(f"--config {path}: its name must end in .yaml, .yml or .toml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: it must map option names to values, not be a {type(values).__name__}"
        )
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _flag_spelling(argument: str) -> str:
    """Flags may be spelt with underscores too."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _explain(detail: Any) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    message: str = detail["msg"].removeprefix("Value error, ")
    if not name:
        return message
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, ServiceConfig.model_fields, n=1)
        return f"{name}: there is no such option" + (f"; did you mean {close[0]}?" if close else "")
    flag = "--" + name.replace("_", "-")
    message = message[0].lower() + message[1:]
    return f"{flag} ({_ENV_PREFIX}{name.upper()}): {detail['input']!r} is not allowed: {message}"
