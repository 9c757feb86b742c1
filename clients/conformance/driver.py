"""Owns the drivers: which language needs what, how it is built, and the process that answers commands."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENTS_DIR = Path(__file__).resolve().parents[1]
_PYTHON_DRIVER = Path(__file__).parent / "drivers" / "python_driver.py"


@dataclass(frozen=True, slots=True)
class Language:
    """One language: what must be there to build its driver, and how to start it."""

    name: str
    commands: tuple[str, ...] = ()  # found on PATH
    files: tuple[str, ...] = ()  # found at these places, relative ones below clients/

    def missing(self) -> list[str]:
        """What the toolchain lacks, for people; empty when it is complete."""
        lacking = [command for command in self.commands if shutil.which(command) is None]
        return lacking + [path for path in self.files if not (CLIENTS_DIR / path).exists()]

    def build(self) -> None:
        """Build the driver and the example. Raises DriverError with the compiler's words."""
        script = CLIENTS_DIR / self.name / "build.sh"
        if not script.exists():
            return
        with script.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # another run may be building, too
            done = subprocess.run(  # noqa: S603
                [script], capture_output=True, text=True, check=False, env=_environment()
            )
        if done.returncode != 0:
            raise DriverError(f"{script} failed:\n{(done.stdout + done.stderr)[-4000:]}")

    def command(self) -> list[str]:
        """How the driver is started, without the target."""
        if self.name == "python":
            return [sys.executable, str(_PYTHON_DRIVER)]
        return [str(CLIENTS_DIR / self.name / "build" / "driver")]


_GO_PATH = "/usr/share/gocode/src/google.golang.org"
_JAR_PATH = "/usr/share/java"
LANGUAGES = {
    language.name: language
    for language in (
        Language("python"),
        Language("node", ("node", "npm"), ("node/node_modules/@grpc/grpc-js",)),
        Language("go", ("go",), (f"{_GO_PATH}/grpc", f"{_GO_PATH}/genproto/googleapis/rpc/errdetails")),
        Language("cpp", ("g++", "make", "pkg-config", "protoc", "grpc_cpp_plugin"), ("/usr/include/grpcpp",)),
        Language(
            "java",
            ("java", "javac", "jar", "protoc", "grpc_java_plugin"),
            tuple(f"{_JAR_PATH}/{jar}.jar" for jar in ("grpc-netty", "protobuf-util", "guava", "gson")),
        ),
        Language("ruby", ("ruby", "grpc_tools_ruby_protoc"), ("/usr/share/rubygems-integration",)),
    )
}


class DriverError(RuntimeError):
    """A driver could not be built, died, or broke the protocol."""


class DriverProcess:
    """A running driver. Use it as a context manager: the process ends with the block."""

    def __init__(self, language: Language, target: str) -> None:
        self._name = language.name
        self._process = subprocess.Popen(  # noqa: S603
            [*language.command(), target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(),
        )
        if (
            self._process.stdin is None or self._process.stdout is None
        ):  # never with PIPE; for the type checker
            raise DriverError("no pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.about: dict[str, str] = self._receive(timeout_s=60)

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run one command. Raises DriverError if the driver dies or is silent beyond the deadline."""
        try:
            self._stdin.write(json.dumps(command) + "\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise DriverError(f"the {self._name} driver is gone") from error
        return self._receive(timeout_s=command["deadline_ms"] / 1000 + 30)

    def close(self) -> None:
        """End the process."""
        try:
            self._stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            for line in self._stdout:
                self._lines.put(line)
        except ValueError:  # closed while reading
            pass
        self._lines.put("")

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DriverError(f"the {self._name} driver did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise DriverError(f"the {self._name} driver ended with exit code {self._process.wait(timeout=5)}")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            raise DriverError(f"the {self._name} driver wrote no JSON: {line[:200]!r}") from None
        return answer  # type: ignore[no-any-return]


def _environment() -> dict[str, str]:
    # The build scripts find the interpreter with the google.rpc protos by it; proxies are not for loopback.
    environment = {k: v for k, v in os.environ.items() if k.lower() not in ("http_proxy", "https_proxy")}
    return {**environment, "PYTHON": sys.executable, "LC_ALL": "C.UTF-8"}
