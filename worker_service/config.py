"""Owns the worker's options: one model, read from flags, environment and a configuration file.

A flag wins over TIDEGATE_WORKER_<NAME>, that over TIDEGATE_<NAME>, that over the file. Imports no torch, so
that `--help` is quick and the environment can still be set before torch starts.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

_OWN_PREFIX = "TIDEGATE_WORKER_"
_SHARED_PREFIX = "TIDEGATE_"
_OWN_OPTIONS = frozenset({"config", "host", "port", "metrics_host", "metrics_port"})
"""Where this process is and what it reads: the scheduler on the same machine has others."""


class WorkerConfig(BaseSettings):
    """Runs a Tidegate worker: it holds a model and its KV memory, and executes a scheduler's step plans.

    Every option can be a flag, an environment variable (TIDEGATE_WORKER_MAX_NUM_SEQS, or, shared with the
    scheduler, TIDEGATE_MAX_NUM_SEQS; host, port and config are not shared) and a key of the --config file
    (max_num_seqs).
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        cli_parse_none_str="none",
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="YAML or TOML file with any of these options.")

    model: str = Field(description="Model to serve: a folder, a GGUF file, a hub id or `demo`.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    offline: bool = Field(False, description="Read hub models from the local cache only.")
    served_model_name: str | None = Field(
        None, description="Name that clients use. none: last part of the model's path or hub id."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on. auto: cuda where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights. auto: the checkpoint's; of a GGUF file, float32 on a CPU.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"] = Field(
        "auto", description="Type of KV. auto: that of weights, bfloat16 beside int8. fp8_e4m3 is for GPUs."
    )
    attention_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto", description="Attention kernels. auto: the fastest that the device has."
    )
    decoder: Literal["auto", "fused", "generic"] = Field(
        "auto",
        description="The forward. fused: the Llama family's, compiled for CPUs; generic: transformers' "
        "modules. auto: fused where it can be.",
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="Weights of the fused decoder. int8: by output channel, activations by token."
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto", description="Capture decodes into CUDA graphs. auto: at start, where the device has them."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads for the forward. none: one for each physical core."
    )

    block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block.")
    kv_memory: ByteSize | None = Field(
        None,
        description="KV memory on a CPU in bytes, such as 2GiB. none: 40% of free memory or what is of use.",
    )
    host_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="Host memory for KV of preempted requests in bytes, such as 4GiB. 0: none.",
    )
    num_blocks: int | None = Field(
        None, ge=2, description="KV blocks, the null block included. none: as many as KV memory holds."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of GPU memory for weights, activations and KV, 0 to 1."
    )
    max_num_seqs: int = Field(256, ge=1, description="Slots: requests held at once.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Most tokens in one step. none: 2048, on a CPU 512."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a request, prompt and output. none: the model's, if KV fits it.",
    )
    max_in_flight: int = Field(2, ge=1, le=16, description="Plans that may be unanswered at a time.")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50061, ge=0, le=65535, description="TCP port to listen on. 0: any free one.")
    scheduler: str | None = Field(
        None, description="host:port of the scheduler's AdminService to register with. none: do not register."
    )
    advertise_address: str | None = Field(
        None, description="host:port by which the scheduler reaches this worker. none: the listening address."
    )
    insecure: bool = Field(
        False,
        description="Allow plain text, and callers without the secret, on other addresses than loopback.",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file: certificate chain of this worker, for its port and for the scheduler's."
    )
    tls_key: Path | None = Field(None, description="PEM file: key of tls-cert.")
    tls_ca: Path | None = Field(
        None, description="PEM file: CA of the scheduler, to which TLS is spoken then. none: plain text."
    )
    mtls: bool = Field(False, description="The scheduler must show a certificate of tls-ca.")
    secret_file: Path | None = Field(
        None,
        description="Secret that scheduler and workers share; callers must show it, the first line is sent.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address of the metrics for Prometheus.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the metrics for Prometheus, at /metrics. none: none."
    )
    drain_timeout_s: float = Field(
        10.0, ge=0, description="Seconds that steps in flight may take after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level to log.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Form of log lines. auto: console on a terminal, else json."
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _keep_none(cls, value: object) -> object:
        return "none" if value is None else value  # on the command line that word means no value

    @field_validator("scheduler", "advertise_address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{value!r} is not host:port")
        return value

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two; allowed: 1, 2, 4, ... 256")
        return value

    @model_validator(mode="after")
    def _check_security(self) -> WorkerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key belong together; set both, or neither")
        if self.mtls and not (self.tls_cert and self.tls_ca):
            raise ValueError("mtls needs tls-cert, tls-key and tls-ca")
        scheduler_host = (self.scheduler or "localhost:1").rpartition(":")[0]
        if self.secret_file and not self.tls_ca and not _is_loopback(scheduler_host):
            raise ValueError(
                f"the secret would go to {self.scheduler}, another machine, unencrypted; set tls-ca"
            )
        if not _is_loopback(self.host):
            self._check_exposed()
        return self

    def _check_exposed(self) -> None:
        """The rules for a host that other machines can reach."""
        if self.secret_file and not self.tls_cert:
            raise ValueError(
                f"the secret would come to {self.host!r} unencrypted; set tls-cert and tls-key, or listen on "
                "127.0.0.1 behind a proxy that has TLS"
            )
        if not self.insecure and not (self.tls_cert and (self.mtls or self.secret_file)):
            raise ValueError(
                f"{self.host!r} is not a loopback address, and a worker does what its callers say; listen on "
                "127.0.0.1, set tls-cert and tls-key with mtls or secret-file, or set --insecure if the "
                "network is trusted"
            )

    @property
    def model_name(self) -> str:
        """Name that clients use."""
        return self.served_model_name or Path(self.model).name

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Orders the sources. Constructed with keywords alone, the model reads nothing but those."""
        if isinstance(init_settings, InitSettingsSource) and "model" in init_settings.init_kwargs:
            return (init_settings,)
        own = EnvSettingsSource(settings_cls, env_prefix=_OWN_PREFIX)
        shared = _SharedEnvironment(settings_cls, env_prefix=_SHARED_PREFIX)
        path = (
            init_settings.init_kwargs.get("config") if isinstance(init_settings, InitSettingsSource) else None
        )
        return (own, shared, *_file_source(settings_cls, path))


class _SharedEnvironment(EnvSettingsSource):
    """Variables that all services read."""

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in _OWN_OPTIONS}


def _file_source(
    settings_cls: type[BaseSettings], path: Path | None
) -> tuple[PydanticBaseSettingsSource, ...]:
    if path is None:
        return ()
    if path.suffix == ".toml":
        return (TomlConfigSettingsSource(settings_cls, path),)
    return (YamlConfigSettingsSource(settings_cls, path),)


def load_config(arguments: list[str] | None = None) -> WorkerConfig:
    """Reads the options; prints help or errors and exits as argparse does, with status 0 or 2.

    Raises pydantic.ValidationError for values out of range.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    path = _config_path(arguments)
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file")
    flags: CliSettingsSource[WorkerConfig] = CliSettingsSource(
        WorkerConfig, cli_prog_name="python -m worker_service", cli_parse_args=arguments
    )
    return WorkerConfig(config=path, _cli_settings_source=flags)  # type: ignore[call-arg]


def _config_path(arguments: list[str]) -> Path | None:
    """The file is named by a source that must be read before the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    named = parser.parse_known_args(arguments)[0].config
    named = named or os.environ.get(f"{_OWN_PREFIX}CONFIG")
    return Path(named) if named else None


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
