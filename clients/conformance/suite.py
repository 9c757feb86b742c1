"""Owns the shape of the cases: what a YAML file may say, checked when it is read. It runs nothing."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CASES_DIR = Path(__file__).parent / "cases"
METHODS = ("Generate", "Attach", "Cancel", "Tokenize", "Detokenize", "ListModels")
SERVERS = ("default", "small", "no-worker", "guarded", "fake")

_CASE_KEYS = {"name", "what", "server", "slow", "steps"}
_CALL_KEYS = {
    "call",
    "as",
    "request",
    "deadline_ms",
    "metadata",
    "cancel_after_messages",
    "reattach_ms",
    "during",
    "unknown_field",
    "same_as_reference",
    "expect",
}


class SuiteError(ValueError):
    """A case file is wrong; the message names the case."""


@dataclass(frozen=True, slots=True)
class Call:
    """One method for the driver to call, and what must hold for the answer."""

    method: str
    request: dict[str, Any]
    name: str = ""  # later steps know the reply by it
    deadline_ms: int = 120_000
    metadata: dict[str, str] = field(default_factory=dict)
    cancel_after_messages: int | None = None
    reattach_ms: int | None = None
    during_after: int = 0
    during: tuple[Call, ...] = ()
    unknown_field: bool = False
    same_as_reference: bool = False
    expect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """Wait until the server holds nothing for anybody."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


Step = Call | Idle | Sleep


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that every client must be able to do."""

    name: str  # file/name
    what: str
    server: str
    slow: bool
    steps: tuple[Step, ...]


def load_cases(pattern: str = "*") -> list[Case]:
    """All cases whose name matches the shell pattern, in the order of files and lines. Raises SuiteError."""
    cases: list[Case] = []
    for path in sorted(CASES_DIR.glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        defaults = document.get("request_defaults", {})
        cases += [_case(path.stem, entry, defaults) for entry in document["cases"]]
    names = [case.name for case in cases]
    if len(names) != len(set(names)):
        raise SuiteError(f"two cases have one name: {sorted(n for n in names if names.count(n) > 1)}")
    return [case for case in cases if fnmatch.fnmatch(case.name, pattern)]


def _case(file: str, entry: dict[str, Any], defaults: dict[str, Any]) -> Case:
    name = f"{file}/{entry.get('name', '?')}"
    unknown = entry.keys() - _CASE_KEYS
    server = entry.get("server", "default")
    if unknown or server not in SERVERS or not entry.get("steps") or not entry.get("what"):
        raise SuiteError(f"case {name}: bad keys {sorted(unknown)}, or no known server, steps or 'what'")
    steps = tuple(_step(name, step, defaults) for step in entry["steps"])
    return Case(name, entry["what"], server, entry.get("slow", False), steps)


def _step(case: str, entry: dict[str, Any], defaults: dict[str, Any]) -> Step:
    if entry.keys() == {"idle"}:
        return Idle()
    if entry.keys() == {"sleep_s"}:
        return Sleep(float(entry["sleep_s"]))
    return _call(case, entry, defaults)


def _call(case: str, entry: dict[str, Any], defaults: dict[str, Any]) -> Call:
    unknown = entry.keys() - _CALL_KEYS
    if unknown or entry.get("call") not in METHODS:
        raise SuiteError(f"case {case}: bad step, keys {sorted(unknown)}, call {entry.get('call')!r}")
    during = entry.get("during", {"after_messages": 0, "commands": []})
    request = entry.get("request", {})
    return Call(
        method=entry["call"],
        request=merged(defaults, request) if entry["call"] == "Generate" else request,
        name=entry.get("as", ""),
        deadline_ms=entry.get("deadline_ms", 120_000),
        metadata=entry.get("metadata", {}),
        cancel_after_messages=entry.get("cancel_after_messages"),
        reattach_ms=entry.get("reattach_ms"),
        during_after=during["after_messages"],
        during=tuple(_call(case, inner, defaults) for inner in during["commands"]),
        unknown_field=entry.get("unknown_field", False),
        same_as_reference=entry.get("same_as_reference", False),
        expect=tuple(line for line in entry.get("expect", "").splitlines() if line.strip()),
    )


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Both objects as one; where both have a key, `over` wins, and inner objects are merged."""
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
