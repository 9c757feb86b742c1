"""Owns options of the scheduler as the simulation's commands take them: texts to values, and checks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ConfigError

_CORE_NAMES = {"scheduling_policy": "policy"}
"""Names of the service's options that are others in the core."""
_SERVICE_NAMES = {core: service for service, core in _CORE_NAMES.items()}

OPTIONS: dict[str, Any] = {
    _SERVICE_NAMES.get(each.name, each.name): each.default
    for each in fields(SchedulerConfig)
    if each.default is not MISSING
    and (each.default is None or isinstance(each.default, bool | int | float | str))
}
"""Options of the scheduler that are one value, by the service's names, with their defaults."""
_WEIGHTS = "tenant_weights"


def service_name(name: str) -> str:
    """The service's name of a core's option."""
    return _SERVICE_NAMES.get(name, name)


def parse(text: str) -> tuple[str, Any]:
    """Reads NAME=VALUE; tenant_weights=A=2,B=1 too. Returns the core's name and the value.

    Names are those of the service's options; the core's own are understood too.

    Raises:
        ConfigError: naming what is allowed.
    """
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if name == _WEIGHTS:
        return name, _parse_weights(value)
    name = service_name(name)
    if name not in OPTIONS:
        allowed = f"NAME=VALUE with one of {', '.join(sorted([*OPTIONS, _WEIGHTS]))}"
        raise ConfigError(name or text, value, allowed)
    core_name = _CORE_NAMES.get(name, name)
    if isinstance(OPTIONS[name], str):
        return core_name, value
    try:
        return core_name, json.loads(value.lower().replace("none", "null"))
    except ValueError:
        raise ConfigError(name, value, "a number, true, false or none") from None


def _parse_weights(value: str) -> dict[str, float]:
    try:
        return {tenant: float(weight) for tenant, weight in (part.split("=") for part in value.split(","))}
    except ValueError:
        raise ConfigError(_WEIGHTS, value, "TENANT=WEIGHT,TENANT=WEIGHT") from None


def parse_flags(arguments: Iterable[str]) -> dict[str, Any]:
    """Reads `--scheduling-policy fair --watermark=0.1`: any option by its name.

    Raises:
        ConfigError: one is none, or lacks its value.
    """
    given: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        flag = waiting.pop(0)
        if not flag.startswith("--"):
            raise ConfigError("arguments", flag, "one file, then --OPTION VALUE")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not waiting:
                raise ConfigError(name, "", "--OPTION VALUE")
            value = waiting.pop(0)
        given.update([parse(f"{name}={value}")])
    return given
