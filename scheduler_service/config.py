"""Owns the options of the scheduler service as one: the service's own, and how they are read and refused.

Options of scheduling, of the journal and of security have files of their own, as have the sources that values
come from (option_sources.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict, SettingsError

from scheduler_service.addresses import check_address
from scheduler_service.journal_options import JournalOptions
from scheduler_service.option_sources import ConfigError, OptionSources
from scheduler_service.scheduling_options import SchedulingOptions
from scheduler_service.security_options import SecurityOptions

_ENV_PREFIX = "TIDEGATE_"


class ServiceConfig(SchedulingOptions, OptionSources, JournalOptions, SecurityOptions):
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
        self.check_scheduling()
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


def load_config(argv: Sequence[str]) -> ServiceConfig:
    """The options from flags, environment, file and preset. Raises ConfigError; exits for --help."""
    flags = [_flag_spelling(argument) for argument in argv]
    try:
        return ServiceConfig(_cli_parse_args=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


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
