"""Simulations: right figures for loads whose outcome is known by arithmetic, and the same run twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.scheduling_options import SchedulingOptions
from scheduler_service.simulation import replay_command
from scheduler_service.simulation.__main__ import main
from scheduler_service.simulation.modelled_worker import StepTime
from scheduler_service.simulation.outcome import Outcome, Passage
from scheduler_service.simulation.report import Objective, jain, summarize
from scheduler_service.simulation.scheduler_options import OPTIONS, parse
from scheduler_service.simulation.simulator import Simulation, fleet
from scheduler_service.simulation.workload import (
    Lengths,
    Workload,
    WorkloadError,
    draw_arrivals,
    draw_tenants,
    read_trace,
)


def load(*rows: tuple[float, int, int], tenants: list[str] | None = None, shared: int = 0) -> Workload:
    """Requests of (arrival, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    groups = np.zeros(len(rows), np.int64)
    names = tenants or ["default"] * len(rows)
    return Workload(arrivals, prompts, outputs, names, groups, shared, seed=0)


def run(
    work: Workload,
    *,
    workers: int = 1,
    step: StepTime | None = None,
    max_tokens: int = 0,
    link_s: float = 0.0,
    **options,
):
    limits = {
        "num_blocks": 65,
        "block_size": 4,
        "num_slots": 8,
        "max_batched_tokens": 1024,
        "max_in_flight": 4,
        "max_model_len": 1024,
        "vocab_size": 40_000,
        "num_host_blocks": 0,
        "block_copy_ms": 0.0,
    }
    for name in limits:
        limits[name] = options.pop(name, limits[name])
    values = {"max_num_seqs": 8, "watermark": 0.0, "hash_key": b"key", **options}
    times = step or StepTime(1.0, 0.0, 0.0)
    specs = fleet(workers, **limits)
    config = SchedulerConfig(**values)
    return Simulation(config, specs, times, work, max_tokens or None, link_s=link_s).run()


def one(outcome: Outcome) -> Passage:
    (passage,) = outcome.finished
    return passage


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_takes_a_step_for_each_token(depth):
    passage = one(run(load((2.0, 10, 5)), pipeline_depth=depth))
    assert (passage.arrival, passage.first_token, passage.last_token) == (2.0, 3.0, 7.0)
    assert (passage.end, passage.output_tokens, passage.prompt_tokens) == (7.0, 5, 10)


@pytest.mark.parametrize(("depth", "end"), [(1, 5 * 1.5), (2, 5 + 0.5), (3, 5 + 0.5)])
def test_two_plans_on_the_way_hide_the_link(depth, end):
    assert one(run(load((0.0, 10, 5)), pipeline_depth=depth, link_s=0.25)).end == pytest.approx(end)


def test_a_steps_time_counts_tokens_and_what_attention_reads():
    passage = one(run(load((0.0, 10, 2)), step=StepTime(1.0, 0.1, 0.01)))
    assert passage.first_token == pytest.approx(1 + 10 * 0.1 + 10 * 0.01)
    assert passage.end - passage.first_token == pytest.approx(1 + 0.1 + 11 * 0.01)


def test_an_output_ends_with_its_last_token_whatever_was_asked_for():
    passage = one(run(load((0.0, 4, 3)), max_tokens=50))
    assert (passage.output_tokens, passage.end) == (3, 3.0)


def test_a_long_prompt_takes_steps_by_the_budget():
    passage = one(run(load((0.0, 40, 1)), max_num_batched_tokens=16))
    assert passage.end == 3.0


def test_two_workers_share_a_burst():
    work = load(*[(0.0, 4, 3)] * 4)
    assert run(work, workers=2, max_num_seqs=2, pipeline_depth=1).end_s == 3.0
    assert run(work, workers=1, max_num_seqs=2, pipeline_depth=1).end_s == 6.0


def test_scarce_blocks_preempt_and_all_outputs_are_whole():
    work = load(*[(0.0, 8, 20 + i) for i in range(6)])
    outcome = run(work, num_blocks=21)
    assert outcome.preemptions > 0
    assert sum(passage.preemptions for passage in outcome.finished) == outcome.preemptions
    assert sorted(passage.output_tokens for passage in outcome.finished) == [20 + i for i in range(6)]
    assert len(outcome.gaps_s) == sum(19 + i for i in range(6))


@pytest.mark.parametrize(
    ("mode", "copied", "again_s"),
    [("recompute", 0, 5 * 0.1), ("swap", 2, 2 * 0.25 + 0.1)],
)
def test_a_preempted_request_is_computed_again_or_copied_out_and_in(mode, copied, again_s):
    """Two prompts fill the 4 blocks that there are, so the second request leaves for the first one's output.
    One of its blocks is written over meanwhile: computing it and a token takes 0.5 s, copying it 0.25 s."""
    outcome = run(
        load((0.0, 8, 4), (0.0, 8, 4)),
        num_blocks=5,
        num_host_blocks=4,
        block_copy_ms=250.0,
        preemption_mode=mode,
        pipeline_depth=1,
        step=StepTime(1.0, 0.1, 0.0),
    )
    kept = int(copied > 0)
    assert (outcome.preemptions, outcome.preemptions_kept, outcome.swapped_blocks) == (1, kept, copied)
    assert [passage.output_tokens for passage in outcome.finished] == [4, 4]
    assert outcome.end_s == pytest.approx(1 + 16 * 0.1 + 3 * 1.1 + 1 + again_s + 2 * 1.1)


def test_a_full_queue_refuses_and_the_run_goes_on():
    outcome = run(load(*[(0.0, 4, 2)] * 5), max_num_queued_reqs=2)
    assert (outcome.refused, len(outcome.finished)) == (3, 2)
    report = summarize(outcome, Objective(10.0, 10.0))
    assert (report.refused, report.good_share) == (3, 0.4)


def test_prompts_of_a_group_hit_the_prefix_cache():
    outcome = run(load((0.0, 20, 2), (10.0, 20, 2), shared=16))
    assert outcome.prefix_hit_tokens == 16
    assert outcome.prefix_queried_tokens == 40


def test_the_same_arguments_give_the_same_outcome():
    work = load(*[(i / 3, 4 + i % 9, 3 + i % 17) for i in range(60)])

    def figures() -> list[tuple[float, float]]:
        outcome = run(work, workers=3, num_blocks=25, step=StepTime(0.1, 0.01, 0.001))
        return [(passage.first_token, passage.end) for passage in outcome.finished]

    first = figures()
    assert len(first) == 60
    assert figures() == first


def test_the_report_adds_up():
    done = [
        Passage("a", 0.0, 4, first_token=1.0, last_token=3.0, end=3.0, output_tokens=3),
        Passage("b", 0.0, 4, first_token=2.0, last_token=8.0, end=8.0, output_tokens=3, preemptions=1),
    ]
    report = summarize(Outcome(finished=done, end_s=10.0, preemptions=1), Objective(2.0, 1.0))
    assert (report.output_tokens_per_s, report.requests_per_s) == (0.6, 0.2)
    assert (report.ttft.mean_ms, report.e2e.mean_ms) == (1500.0, 5500.0)
    assert (report.goodput_per_s, report.good_share, report.preempted_share) == (0.1, 0.5, 0.5)
    assert [tenant.mean_ms_per_token for tenant in report.tenants.values()] == pytest.approx(
        [1000.0, 8000 / 3]
    )
    assert report.latency_equality == pytest.approx(jain([3.0, 8.0]))


def test_jains_index_is_one_for_equal_shares():
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness):
    times = draw_arrivals(40_000, 10.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(10.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, abs=0.1)


@pytest.mark.parametrize(
    ("text", "mean"),
    [("fixed:7", 7), ("uniform:10:30", 20), ("exponential:100", 100), ("lognormal:100:0.5", 100)],
)
def test_lengths_have_the_mean_that_was_asked_for(text, mean):
    drawn = Lengths.parse(text, 100_000).draw(40_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= 1
    assert Lengths.parse(text, 5).draw(100, np.random.default_rng(1)).max() <= 5


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:x", "uniform:3", "normal:3:1", "fixed:1:2"])
def test_other_lengths_are_refused_by_name(text):
    with pytest.raises(WorkloadError, match="allowed: fixed:N"):
        Lengths.parse(text, 100)


def test_tenants_come_by_their_shares():
    names = draw_tenants("a=3,b=1", 10_000, np.random.default_rng(1))
    assert names.count("a") == pytest.approx(7500, abs=200)
    for text in ("a", "a=0", "a=1,b", ""):
        with pytest.raises(WorkloadError, match="NAME=SHARE"):
            draw_tenants(text, 1, np.random.default_rng(1))


def test_a_trace_is_read_by_arrival_and_a_bad_line_is_named(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,tenant\n2,10,3,b\n0.5,4,1,\n")
    work = read_trace(trace, 100, seed=0)
    assert work.arrivals.tolist() == [0.5, 2.0]
    assert (work.prompts.tolist(), work.outputs.tolist()) == ([4, 10], [1, 3])
    assert work.tenants == ["default", "b"]
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,many,1\n")
    with pytest.raises(WorkloadError, match="line 3: expected the columns"):
        read_trace(trace, 100, seed=0)
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,101,1\n")
    with pytest.raises(WorkloadError, match="line 2: lengths are 1 to 100"):
        read_trace(trace, 100, seed=0)


def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate_client.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_compares_the_values_of_an_option(tmp_path: Path):
    content = tmp_path / "out.json"
    options = [
        "--requests",
        "12",
        "--output",
        "fixed:5",
        "--host-blocks=4",
        "--block-copy-ms=0.1",
        "--sweep",
        "max_num_seqs=1,8",
        "--json",
        str(content),
    ]
    done = tidegate(*options)
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs=1" in done.stdout and "output tokens/s" in done.stdout
    reports = json.loads(content.read_text())
    assert [report["requests"] for report in reports.values()] == [12, 12]
    assert reports["max_num_seqs=1"]["ttft"]["mean_ms"] > reports["max_num_seqs=8"]["ttft"]["mean_ms"]


def test_a_file_that_cannot_be_written_is_told_by_its_option(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate", "--requests=1", "--json=/nowhere/figures.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "error: --json /nowhere/figures.json: No such file or directory\n" in capsys.readouterr().err


def test_a_missing_recording_is_told_in_words(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replay", "/nowhere.recording"])
    with pytest.raises(SystemExit) as ended:
        replay_command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: /nowhere.recording: No such file or directory\n"


def test_options_have_the_names_of_the_services():
    assert parse("scheduling_policy=fair") == parse("scheduling-policy=fair") == ("policy", "fair")
    assert parse("policy=fair") == ("policy", "fair")
    without_name = {"binding", "max_overtakes", "overtaking_window"}  # the service has no options for them
    assert set(OPTIONS) - set(SchedulingOptions.model_fields) == without_name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--set", "policy=nope"], "policy is 'nope'; allowed: one of"),
        (["--set", "scheduling_policy=nope"], "policy is 'nope'; allowed: one of"),
        (["--set", "nope=1"], "nope is '1'; allowed: NAME=VALUE with one of"),
        (["--sweep", "watermark=1"], "watermark is 1; allowed: a share of the blocks in [0, 1)"),
        (["--block-copy-ms", "inf"], "block_copy_ms is inf; allowed: milliseconds of at least 0"),
        (["--rate", "0"], "rate is 0.0"),
        (["--trace", "/nowhere.csv"], "error: --trace /nowhere.csv: No such file or directory"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(options, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
