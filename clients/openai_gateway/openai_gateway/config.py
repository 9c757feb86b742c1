"""Options of the gateway: names, units, defaults, and which combinations are safe to start."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from tidegate_client.access import TOKEN_VARIABLE

_ENV_PREFIX = "TIDEGATE_GATEWAY_"


class ConfigError(Exception):
    """Options that can't be used. The message has one line for each, for whoever started the gateway."""


class GatewayConfig(BaseSettings):
    """Serves OpenAI's HTTP API in front of a scheduler. Each option is also an environment variable
    (TIDEGATE_GATEWAY_ and its name in capitals). How the scheduler is reached is said by TIDEGATE_ADDRESS,
    TIDEGATE_TLS_CA, TIDEGATE_TLS_CERT, TIDEGATE_TLS_KEY and TIDEGATE_TOKEN, as for every client."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        cli_prog_name="python -m openai_gateway",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    address: str | None = Field(
        None, description="host:port of the scheduler (unset: TIDEGATE_ADDRESS, or localhost:50051)."
    )
    tls_cert: Path | None = Field(None, description="PEM file: certificate chain, to serve HTTPS.")
    tls_key: Path | None = Field(None, description="PEM file: key of tls_cert.")
    insecure: bool = Field(False, description="Allow plain HTTP on addresses other than loopback.")
    api_keys: Path | None = Field(
        None,
        description="File of API keys, one a line, or sha256: and its hash; the scheduler then gets "
        "TIDEGATE_TOKEN. Unset: the caller's key is its token at the scheduler.",
    )
    user_as_tenant: bool = Field(
        False, description="Count a request for its field `user`; not with tokens, which have a tenant."
    )
    max_body_mib: int = Field(16, ge=1, le=256, description="Most MiB in the body of a request.")
    drain_window: float = Field(
        2.0, ge=0, le=300, description="Time that /health says no while requests are still taken (seconds)."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=86_400, description="Longest time for answers to finish after that (seconds)."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe events that are logged."
    )
    access_log: bool = Field(False, description="Log each request's method, path and status.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both, or neither")
        if not self.tls_cert and not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} is not a loopback address, and prompts and keys would come there "
                "unencrypted; listen on 127.0.0.1, set tls_cert and tls_key, or set --insecure if the "
                "network is trusted"
            )
        if os.environ.get(TOKEN_VARIABLE) and self.api_keys is None:
            raise ValueError(
                f"{TOKEN_VARIABLE} is set, so whoever reaches the gateway would use the scheduler with it; "
                f"set api_keys, or unset {TOKEN_VARIABLE} so that each caller's key is its own token"
            )
        return self


def load_config(argv: Sequence[str]) -> GatewayConfig:
    """The options from flags and environment. Raises ConfigError; exits for --help and unknown flags."""
    try:
        return GatewayConfig(_cli_parse_args=list(argv))  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _explain(detail: object) -> str:
    assert isinstance(detail, dict)  # noqa: S101 - pydantic's details are
    name = ".".join(map(str, detail["loc"]))
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
