"""`tidegate serve` with fake services: what it starts, what it says, and that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tidegate_client.cli.serve import PRESET_WORKER_LIMITS
from tidegate_client.cli.service_process import readable

FAKES = Path(__file__).parent / "fake_services"
DEADLINE_S = 30.0


class Served:
    """A `tidegate serve` in a process of its own, and what its services recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace_file = folder / "trace"
        self.trace_file.touch()
        self.stderr_file = folder / "stderr"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **environment: str) -> None:
        variables = {"PYTHONPATH": str(FAKES), "FAKE_SERVICES_TRACE": str(self.trace_file)}
        variables |= {"TMPDIR": str(self.temporary), "COLUMNS": "200"} | environment
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_client.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self.stderr_file.open("w"),
            text=True,
            env=os.environ | variables,
            cwd=self.folder,  # `python -m` looks here first, and the real services must not be found
        )

    def read_until(self, text: str) -> str:
        lines = ""
        while text not in lines:
            line = self.process.stdout.readline()
            assert line, f"it ended early: {lines}{self.stderr_file.read_text()}"
            lines += line
        return lines

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE_S)

    def trace(self) -> list[list[str]]:
        return [line.split() for line in self.trace_file.read_text().splitlines()]

    def pids(self) -> list[int]:
        return [int(words[2]) for words in self.trace() if words[0] == "started"]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    for pid in it.pids():
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
    if it.process is not None:
        it.process.kill()
        it.process.wait()
        it.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_scheduler_first_and_leaves_no_process(served: Served, number: int) -> None:
    served.start("some/model")
    printed = served.read_until("Logs: ")
    address = re.search(r"a is served at (127\.0\.0\.1:\d+)", printed).group(1)
    assert f'  tidegate generate "Once upon a time" --max-tokens 32 --address {address}\n' in printed
    assert f"{address} tidegate.inference.v1.InferenceService/Generate\n" in printed
    assert served.end(number) == 0
    assert [words[:2] for words in served.trace()] == [
        ["started", "scheduler"],
        ["started", "worker"],
        ["ended", "scheduler"],
        ["ended", "worker"],
    ]
    assert not any(map(runs, served.pids()))
    assert list(served.temporary.iterdir()) == []


def test_services_end_when_the_command_is_killed(served: Served) -> None:
    served.start("some/model", "--workers", "2")
    served.read_until("Logs: ")
    assert len(served.pids()) == 3
    served.end(signal.SIGKILL)
    assert eventually(lambda: not any(map(runs, served.pids())))


def test_workers_of_a_scheduler_with_frontends_register_at_its_admin_port(served: Served) -> None:
    served.start("a/model", "--frontends", "2", "--port", "0")
    served.read_until("Logs: ")
    flags = {words[1]: set(words[3:]) for words in served.trace()}
    assert {"--frontends=2", "--admin-port=0"} <= flags["scheduler"]
    assert "--scheduler=127.0.0.1:7" in flags["worker"]
    served.end(signal.SIGINT)


def test_options_go_to_the_service_that_has_them(served: Served) -> None:
    arguments = [
        "a/model",
        "--preset=long-context",
        "--dtype=float32",
        "--kv-memory=1GiB",
        "--max-num-seqs=8",
    ]
    arguments += ["-S", "watermark=0.05", "-S", "enable-prefix-caching=false", "-W", "threads=3"]
    served.start(*arguments, "--device=cpu")
    served.read_until("Logs: ")
    flags = {words[1]: set(words[3:]) for words in served.trace()}
    assert {"--preset=long-context", "--max-num-seqs=8", "--watermark=0.05"} <= flags["scheduler"]
    assert {"--no-enable-prefix-caching", "--host=127.0.0.1", "--port=50051"} <= flags["scheduler"]
    assert {"--model=a/model", "--device=cpu", "--dtype=float32", "--kv-memory=1GiB"} <= flags["worker"]
    assert {"--max-num-batched-tokens=4096", "--max-num-seqs=8", "--threads=3"} <= flags["worker"]
    served.end(signal.SIGINT)


def test_a_worker_that_cannot_start_ends_it_with_the_reason(served: Served) -> None:
    served.start("some/model", FAKE_WORKER_FAILS="1")
    assert served.process.wait(timeout=DEADLINE_S) == 1
    told = served.stderr_file.read_text()
    assert "error: the worker 0 ended with status 1" in told
    assert "cannot load the model: there is no such folder" in told
    assert not any(map(runs, served.pids()))
    (logs,) = served.temporary.iterdir()
    assert "no such folder" in (logs / "worker-0.log").read_text()


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_an_option_that_a_service_refuses_is_told_without_its_usage(served: Served, service: str) -> None:
    served.start("some/model", FAKE_REFUSES=service)
    assert served.process.wait(timeout=DEADLINE_S) == 2
    told = served.stderr_file.read_text()
    name = {"scheduler": "scheduler", "worker": "worker 0"}[service]
    assert f"error: the {name} refuses its options: unrecognized arguments: --foo=1; `" in told
    assert f" -m {service}_service --help` lists them\n" in told
    assert "usage:" not in told


@pytest.mark.parametrize("model", ["/nowhere", "./nowhere", "nowhere", "no/such/model"])
def test_what_is_no_model_is_refused_before_anything_is_started(served: Served, model: str) -> None:
    served.start(model)
    assert served.process.wait(timeout=DEADLINE_S) == 2
    assert f"error: there is no model at {model}: give a folder" in served.stderr_file.read_text()
    assert served.pids() == []


def test_log_lines_are_for_people() -> None:
    lines = [
        '{"time": "t", "level": "error", "logger": "l", "event": "cannot load", "model": "m", '
        '"exception": "Traceback\\n  line\\nOSError: gone"}',
        "usage: python -m worker_service [-h]",
        "                [--model str]",
        "not JSON",
        "7",
    ]
    assert readable(lines) == ["error: cannot load model=m OSError: gone", "not JSON", "7"]


def test_the_loss_of_one_worker_of_two_is_told_and_survived(served: Served) -> None:
    served.start("some/model", "--workers", "2")
    served.read_until("Logs: ")
    _, first, second = served.pids()
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: "ended with status -9; its requests move" in served.stderr_file.read_text())
    assert runs(second)
    assert served.process.poll() is None
    os.kill(second, signal.SIGKILL)
    assert served.process.wait(timeout=DEADLINE_S) == 1
    assert not any(map(runs, served.pids()))


def test_a_malformed_passthrough_option_is_refused(served: Served) -> None:
    served.start("some/model", "-W", "threads")
    assert served.process.wait(timeout=DEADLINE_S) == 2
    assert "'threads' is not NAME=VALUE" in served.stderr_file.read_text()
    assert served.pids() == []


def test_limits_of_presets_are_those_of_the_scheduler() -> None:
    from scheduler_service.option_sources import PRESETS

    theirs = {
        name: (values["max_num_batched_tokens"], values["max_num_seqs"]) for name, values in PRESETS.items()
    }
    assert theirs == PRESET_WORKER_LIMITS


def test_the_console_is_named_where_it_is_asked_for(served: Served) -> None:
    served.start("some/model", "--console-port", "8099")
    assert "The console is at http://127.0.0.1:8099/" in served.read_until("Logs: ")
    (scheduler,) = [line for line in served.trace() if "--console-port=8099" in line]
    assert scheduler[1] == "scheduler"
    assert served.end(signal.SIGTERM) == 0
