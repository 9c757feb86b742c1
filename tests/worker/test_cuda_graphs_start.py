"""A start captures decodes where it can, says so where it can't, and refuses where memory does not do."""

import logging

import pytest
import torch
from fake_cuda_graphs import FakeCapture

from worker_service import cuda_graphs, start
from worker_service.config import WorkerConfig
from worker_service.cuda_graphs import CudaCapture
from worker_service.errors import KvMemoryError, NotCapturableError, UnsupportedModelError
from worker_service.executor import run_largest_graph
from worker_service.worker import Worker


@pytest.fixture
def load(tiny_model, monkeypatch):
    """Loads a worker whose device has graphs, as `capture` makes them."""

    def run(capture) -> Worker:
        monkeypatch.setattr(start, "uses_graphs", lambda model, wanted: wanted == "auto")
        monkeypatch.setattr(start, "CudaCapture", lambda device: capture)
        options = {"attention_backend": "reference", "decoder": "generic", "max_num_seqs": 3}
        made = Worker(WorkerConfig(model=str(tiny_model("llama")), **options))
        made.load()
        return made

    return run


def test_decodes_are_captured_before_the_worker_is_ready(load, caplog):
    capture = FakeCapture()
    with caplog.at_level(logging.INFO):
        made = load(capture)
    assert len(capture.graphs) == 3  # of 1, 2 and 3 rows
    assert "captured decodes into CUDA graphs" in caplog.messages
    assert (made.progress, made.detail) == (1.0, "ready")


def test_a_model_without_graphs_is_served_and_the_log_says_why(load, caplog):
    def refuse(run):
        raise NotCapturableError("its modules wait for the device within a step")

    made = load(refuse)
    assert made.engine is not None
    record = next(r for r in caplog.records if r.message == "decodes are not captured into CUDA graphs")
    assert record.levelno == logging.WARNING
    assert record.fields == {"reason": "its modules wait for the device within a step"}


def test_graphs_without_room_are_refused_with_a_way_out(load):
    def run_out(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(KvMemoryError, match="lower --gpu-memory-utilization or --max-num-seqs, or set"):
        load(run_out)


def test_a_capture_that_breaks_ends_the_start_with_a_way_out(load):
    def break_off(run):
        raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(UnsupportedModelError, match=r"error during capture\. Set --cuda-graphs off"):
        load(break_off)


def test_memory_is_measured_by_a_step_of_the_largest_graph(loaded, monkeypatch):
    model = loaded("llama")
    seen = []

    def forward(step, token_ids, positions, keep):
        seen.append((len(token_ids), len(keep)))
        return torch.zeros(len(keep), 7)

    class FakeModel:
        device, max_model_len = model.device, model.max_model_len

    FakeModel.forward = staticmethod(forward)
    run_largest_graph(FakeModel, 20)
    run_largest_graph(FakeModel, 4096)
    assert seen == [(20, 20), (512, 512)]


class FakeCuda:
    """The parts of torch.cuda that a capture uses, and what was done with them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.mode = "default"

    def install(self, monkeypatch) -> None:
        fake = self

        class FakeStream:
            def __init__(self, device) -> None:
                pass

            def wait_stream(self, other) -> None:
                fake.calls.append("wait")

        class FakeContext:
            def __init__(self, name: str) -> None:
                self.name = name

            def __enter__(self) -> None:
                fake.calls.append(f"enter {self.name}")

            def __exit__(self, *raised: object) -> None:
                fake.calls.append(f"leave {self.name}")

        class FakeCudaGraph:
            def replay(self) -> None:
                fake.calls.append("replay")

        def set_mode(mode: str) -> None:
            fake.mode = mode

        replaced = {
            "CUDAGraph": FakeCudaGraph,
            "Stream": FakeStream,
            "graph": lambda graph, pool, **options: FakeContext(f"capture in {pool}"),
            "graph_pool_handle": lambda: "pool",
            "stream": lambda stream: FakeContext("stream"),
            "current_stream": lambda: None,
            "get_sync_debug_mode": lambda: fake.mode,
            "set_sync_debug_mode": set_mode,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(cuda_graphs.torch.cuda, name, value)


def test_a_capture_runs_once_where_waiting_is_an_error_then_records(monkeypatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))
    replay = capture(lambda: cuda.calls.append(f"run, waiting is {cuda.mode}"))
    assert cuda.calls == [
        "wait",
        "enter stream",
        "run, waiting is error",
        "enter capture in pool",
        "run, waiting is default",
        "leave capture in pool",
        "leave stream",
    ]
    replay()
    assert cuda.calls[-1] == "replay"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("called a synchronizing CUDA operation"), NotCapturableError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ],
)
def test_waiting_for_the_device_is_found_before_a_capture_breaks(error, expected, monkeypatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)

    def wait():
        raise error

    with pytest.raises(expected):
        CudaCapture(torch.device("cuda"))(wait)
    assert cuda.calls == ["wait", "enter stream", "leave stream"]
    assert cuda.mode == "default"
