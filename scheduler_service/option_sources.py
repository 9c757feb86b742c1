"""Owns the sources of options besides flags and the environment: the configuration file and the presets.

Precedence: flags, then TIDEGATE_* variables, then the configuration file, then the preset, then defaults.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

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


class OptionSources(BaseSettings):
    """Options that say where others come from."""

    config: Path | None = Field(None, description="File of options, YAML or TOML, with these names as keys.")
    preset: Literal["concurrency", "long-context"] | None = Field(
        None,
        description="Values from practice; explicit ones win. concurrency: 16384 batched tokens, 256 seqs, "
        "512 queued, priority. long-context: 4096 batched tokens, 64 seqs, prefill threshold 8192.",
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
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path}: cannot be read: {why}") from None
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
