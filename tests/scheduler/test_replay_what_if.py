"""What would have happened: recorded loads run again, with the recorded options and with others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from test_recording_replay import command, recorded, storm

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import FinishReason
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.recording import Recorder
from scheduler_service.recording_file import RecordingError, RecordingWriter, read_records
from scheduler_service.replay import read_stops
from scheduler_service.simulation import simulator
from scheduler_service.simulation.modelled_worker import StepTime
from scheduler_service.simulation.outcome import Outcome
from scheduler_service.simulation.recorded import RecordedRun, StepTimeFit, read_run
from scheduler_service.simulation.report import Objective, summarize
from scheduler_service.simulation.simulator import Simulation, fleet
from scheduler_service.simulation.workload import Workload

_STEP = StepTime(0.01, 0.001, 0.0001, 0.00002)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def workload(count: int = 60) -> Workload:
    draw = np.random.default_rng(3)
    return Workload(
        arrivals=np.cumsum(draw.exponential(0.05, count)),
        prompts=draw.integers(3, 60, count),
        outputs=draw.integers(1, 30, count),
        tenants=["heavy" if x else "light" for x in draw.integers(0, 8, count)],
        prefixes=draw.integers(0, 3, count),
        shared_tokens=16,
        seed=0,
    )


def workers(count: int = 2, num_host_blocks: int = 0) -> list[WorkerSpec]:
    return fleet(
        count,
        num_host_blocks=num_host_blocks,
        block_copy_ms=5.0,
        num_blocks=49,
        block_size=4,
        num_slots=6,
        max_batched_tokens=256,
        max_in_flight=4,
        max_model_len=256,
        vocab_size=1 << 20,
    )


def config(**options: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 6, "max_num_batched_tokens": 64, "hash_key": b"k", **options})


def record_simulation(path: Path, monkeypatch, num_host_blocks: int = 0) -> Outcome:
    """A recording whose steps take exactly as long as a formula says."""
    options = {"preemption_mode": "swap"} if num_host_blocks else {}
    recorder = Recorder(RecordingWriter(path))
    with monkeypatch.context() as patch:
        patch.setattr(simulator, "Scheduler", recorder.new_core)
        specs = workers(num_host_blocks=num_host_blocks)
        outcome = Simulation(config(**options), specs, _STEP, workload()).run()
    recorder.close()
    return outcome


def read(path: Path) -> RecordedRun:
    return read_run(read_records(path), read_stops(path))


def figures(outcome: Outcome) -> list[tuple[float, ...]]:
    return [(p.arrival, p.first_token, p.end, p.output_tokens, p.preemptions) for p in outcome.finished]


def test_a_recording_has_the_figures_of_its_run(path, monkeypatch):
    ran = record_simulation(path, monkeypatch)
    run = read(path)
    assert ran.preemptions > 0 and ran.prefix_hit_tokens > 0
    assert np.allclose(figures(run.outcome), figures(ran))
    first, second = (summarize(each, Objective(1.0, 0.1)).as_dict() for each in (ran, run.outcome))
    timed = (
        "ttft",
        "itl",
        "e2e",
        "preemptions",
        "prefix_hit_share",
        "steps",
        "busy",
        "tenants",
        "duration_s",
    )
    for name in timed:
        assert _flat(second[name]) == pytest.approx(_flat(first[name]), rel=1e-6), name


def _flat(value: object) -> object:
    return (
        {f"{k}/{i}": v for k, d in value.items() for i, v in _items(d)} if isinstance(value, dict) else value
    )


def _items(value: object) -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        return [("", value)]
    return [(f"{k}/{i}", v) for k, each in value.items() for i, v in _items(each)]


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_step_times_are_found_again(path, monkeypatch, num_host_blocks):
    ran = record_simulation(path, monkeypatch, num_host_blocks)
    assert (ran.swapped_blocks > 0) == (num_host_blocks > 0)
    fit = read(path).fit()
    found = fit.step_time
    for name in ("base_s", "per_token_s", "per_kv_token_s", "per_pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(_STEP, name), rel=1e-3), name
    assert fit.mean_error < 1e-3


def test_the_recorded_options_give_the_recorded_run_again(path, monkeypatch):
    ran = record_simulation(path, monkeypatch)
    run = read(path)
    assert run.config is not None
    again = Simulation(run.config, [], _STEP, run.load([])).run()
    assert np.allclose(figures(again), figures(ran))


@pytest.mark.parametrize(
    "options", [{"policy": "fair"}, {"admission": "predicted"}, {"max_num_batched_tokens": 32}]
)
def test_other_options_give_what_they_would_have_given(path, monkeypatch, options):
    ran = record_simulation(path, monkeypatch)
    load = read(path).load([])
    what_if = Simulation(config(**options), [], _STEP, load).run()
    directly = Simulation(config(**options), workers(), _STEP, workload()).run()
    assert np.allclose(figures(what_if), figures(directly))
    assert not np.allclose(sorted(figures(what_if)), sorted(figures(ran)))


def test_steps_vary_as_the_recorded_ones_did(path, monkeypatch):
    record_simulation(path, monkeypatch)
    run = read(path)
    assert run.config is not None

    def span() -> list[float]:
        work = Simulation(run.config, [], _STEP, run.load([0.5, 1.5])).run()
        return [passage.end for passage in work.finished]

    first = span()
    assert first == span()
    assert first[-1] == pytest.approx(run.outcome.end_s, rel=0.1)
    assert first != [passage.end for passage in run.outcome.finished]


def test_negative_coefficients_are_left_out():
    sizes = [(n, 10 * n, 0) for n in range(1, 40)]
    fit = StepTimeFit.of(sizes, [0.02 - 0.0001 * n for n in range(1, 40)])
    coefficients = fit.step_time
    assert coefficients.base_s == pytest.approx(0.018)
    assert (coefficients.per_token_s, coefficients.per_kv_token_s, coefficients.per_pair_s) == (0, 0, 0)
    with pytest.raises(RecordingError, match="no step"):
        StepTimeFit.of([], [])


@pytest.mark.parametrize("seed", range(3))
def test_cancels_timeouts_candidates_and_lost_workers_come_again(path, seed):
    harness, recorder = recorded(path, workers=2, depth=2, num_blocks=41, max_num_queued_reqs=3)
    storm(harness, seed)
    recorder.close()
    run = read(path)
    ended = [seen.finished.reason for seen in harness.seen.values() if seen.finished is not None]
    by_itself = sum(reason in (FinishReason.STOP, FinishReason.LENGTH) for reason in ended)
    assert (len(run.outcome.finished), run.outcome.failed) == (by_itself, len(ended) - by_itself)
    assert run.outcome.refused > 0
    assert run.config is not None
    again = Simulation(run.config, [], StepTime(1e-6, 0.0, 0.0), run.load([])).run()
    candidates = sum(spec.n for spec in run.load([]).requests)
    assert len(again.finished) + again.failed + again.refused == candidates
    # So fast that nobody waits: nobody is refused or times out, and cancels come too late.
    assert (again.refused, again.failed) == (0, 0)
    lengths = sorted(passage.output_tokens for passage in run.outcome.finished)
    assert sorted(set(lengths)) == sorted(
        set(lengths) & {passage.output_tokens for passage in again.finished}
    )


def test_the_command_compares_three_runs(path, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    ran = record_simulation(path, monkeypatch)
    figures_file, folder = tmp_path / "figures.json", tmp_path / "plots"
    flags = ["--policy", "fair", "--tenant-weights", "light=2", "--json", figures_file, "--plots", folder]
    assert command(monkeypatch, path, *flags) == 0
    printed = capsys.readouterr().out
    assert "simulated" in printed and "scheduling_policy=fair" in printed and "mean error" in printed
    content = json.loads(figures_file.read_text())
    recorded_side, simulated, what_if = content.values()
    assert recorded_side["requests"] == simulated["requests"] == what_if["requests"] == 60
    assert simulated["ttft"]["p99_ms"] == pytest.approx(recorded_side["ttft"]["p99_ms"], rel=0.05)
    assert recorded_side["preemptions"] == ran.preemptions
    assert (
        what_if["tenants"]["light"]["ttft"]["mean_ms"] < recorded_side["tenants"]["light"]["ttft"]["mean_ms"]
    )
    assert sorted(each.name for each in folder.iterdir()) == ["batches.png", "kv_use.png", "latencies.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in folder.iterdir())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--scheduling-policy", "random"], "policy is 'random'"),
        (["--polcy", "fair"], "polcy"),
        (["--watermark"], "watermark"),
        (["--watermark", "high"], "a number"),
        (["--tenant-weights", "a"], "TENANT=WEIGHT"),
    ],
)
def test_wrong_options_are_named(path, monkeypatch, capsys, flags, complaint):
    record_simulation(path, monkeypatch)
    assert command(monkeypatch, path, *flags) == 2
    assert complaint in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(path, monkeypatch, capsys):
    record_simulation(path, monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command(monkeypatch, path, "--watermark", "0.1", "--plots", path.parent / "plots") == 2
    assert "pip install '.[plots]'" in capsys.readouterr().err


def test_requests_whose_end_is_not_recorded_are_in_no_column(path, monkeypatch, capsys, tmp_path):
    record_simulation(path, monkeypatch)
    records = list(read_records(path))
    cut = RecordingWriter(path)
    for record in records[: len(records) // 2]:
        cut.write(record)
    cut.close()
    run = read(path)
    ended = len(run.outcome.finished)
    assert 0 < ended < ended + len(run.unfinished) < 60
    figures_file = tmp_path / "figures.json"
    assert command(monkeypatch, path, "--scheduling-policy", "fair", "--json", figures_file) == 0
    assert [column["requests"] for column in json.loads(figures_file.read_text()).values()] == [ended] * 3
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ends abruptly: {len(run.unfinished)} requests unfinished; all columns leave them out" in printed
    assert "objective: first token within 1000 ms, mean gap at most 50 ms" in printed


def test_moves_from_a_lost_worker_are_not_preemptions(path):
    harness, recorder = recorded(path, workers=2, num_blocks=65)
    for name in "ab":
        harness.accept(name, 9, max_tokens=12)
    harness.step()
    harness.lose("w0")
    harness.run()
    recorder.close()
    run = read(path)
    report = summarize(run.outcome, Objective(1.0, 1.0))
    assert (report.preemptions, report.preempted_share, report.moves, report.moved_share) == (0, 0.0, 1, 0.5)
    again = summarize(
        Simulation(run.config, [], StepTime(1.0, 0.0, 0.0), run.load([])).run(), Objective(1.0, 1.0)
    )
    assert (again.preemptions, again.preempted_share) == (0, 0.0)
