"""Recordings: what was played comes out again, nothing of a prompt is in them, and damage is named."""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_harness import Harness
from engine_harness import Cluster, FakeSink, spec
from fake_worker import FakeWorker
from service_process import SERVING, ServiceProcess, generate, read, until_health

from scheduler_service import replay as replay_module
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepResult
from scheduler_service.recording import Recorder
from scheduler_service.recording_file import RecordingError, RecordingWriter, read_records
from scheduler_service.replay import ReplayMismatchError, replay
from scheduler_service.simulation.replay_command import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def recorded(path: Path, **options: object) -> tuple[Harness, Recorder]:
    recorder = Recorder(RecordingWriter(path))
    workers = options.pop("workers", 1)
    harness = Harness(workers=0, **options)
    harness.core = harness.scheduler = recorder.new_core(harness.config)
    for i in range(workers):
        harness.add_worker(f"w{i}")
    return harness, recorder


def command(monkeypatch, *arguments: object) -> int:
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["replay", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


def storm(harness: Harness, seed: int) -> None:
    """Requests that share prefixes, stop early, are cancelled or time out, and workers that come and go."""
    draw = random.Random(seed)
    for i in range(60):
        harness.now += draw.random()
        shared = list(range(4 * draw.randrange(6)))
        prompt = [*shared, *(draw.randrange(64) for _ in range(draw.randint(1, 9)))]
        options = {
            "n": draw.choice([1, 1, 1, 3]),
            "priority": draw.randrange(3),
            "tenant": draw.choice("ab"),
            "cache_salt": draw.choice(["", "", "secret"]),
            "eos_token_ids": frozenset({1, 2, 3}),
            "min_tokens": draw.randrange(4),
            "queue_timeout_s": draw.choice([None, 3.0]),
        }
        harness.submit(f"r{i}", prompt, max_tokens=draw.randint(4, 20), **options)
        for worker_id in list(harness.workers):
            harness.plan(worker_id)
            if harness.workers[worker_id].inbox and draw.random() < 0.8:
                harness.answer(worker_id)
        if i % 9 == 4:
            harness.cancel(f"r{draw.randrange(i)}")
        if i % 13 == 6:
            harness.note(harness.core.expire(harness.now))
        if i == 30:
            harness.lose("w0")
            harness.add_worker("w0")
        if i == 45:
            harness.core.reset_prefix_cache()
    harness.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_plans_come_out_again(path, policy, seed):
    harness, recorder = recorded(path, workers=2, depth=2, num_blocks=25, policy=policy, watermark=0.1)
    storm(harness, seed)
    recorder.close()
    counters = harness.core.state(harness.now).counters
    assert counters.prefix_hit_tokens > 0 and counters.requests_cancelled > 0 and counters.requests_moved > 0
    summary = replay(path)
    assert (summary.plans, summary.accepted, summary.refused) == (len(harness.plans), 60, 0)
    assert summary.seconds == pytest.approx(harness.now, abs=1.0)


def test_a_prefix_of_an_earlier_output_stays_one(path):
    harness, recorder = recorded(path)
    harness.accept("first", 8, max_tokens=9)
    harness.run()
    talk = [*harness.specs["first"].prompt_token_ids.tolist(), *harness.seen["first", 0].tokens]
    harness.accept("second", [*talk, 5, 6, 7], max_tokens=2)
    harness.run()
    assert harness.seen["second", 0].events[0].cached_tokens == 16
    recorder.close()
    assert replay(path).plans == len(harness.plans)


def test_stops_by_text_failed_rows_restored_and_refused_requests_come_out_again(path):
    harness, recorder = recorded(path, max_num_queued_reqs=1)
    core = harness.core
    core.restore(harness.spec("back", 6, max_tokens=9, n=2), [[4, 5], None], 0.0)
    harness.step()
    core.stop("back", 0, 1, 1.0)
    harness.accept("bad", 4)
    assert harness.submit("late", 4).reason.value == "queue_full_requests"
    harness.plan()
    (slot,) = (row for row in harness.plans[-1].slots.tolist())
    column = np.array([slot], np.int32)
    harness.note(core.apply("w0", StepResult(2, column, np.array([-7], np.int32), frozenset({0})), 2.0))
    core.drain_worker("w0", 3.0)
    core.start_draining()
    recorder.close()
    summary = replay(path)
    assert (summary.plans, summary.accepted, summary.refused) == (2, 2, 1)


async def test_what_an_engine_did_comes_out_again(path):
    recorder = Recorder(RecordingWriter(path))
    cluster = Cluster(SchedulerConfig(max_num_seqs=4))
    cluster.engine._guard.core = recorder.new_core(SchedulerConfig(max_num_seqs=4))
    await cluster.add(FakeWorker(num_blocks=33))
    sinks = [FakeSink() for _ in range(8)]
    for i, sink in enumerate(sinks):
        cluster.engine.submit(spec(f"r{i}", sink, prompt=9 + i, max_tokens=12))
    for sink in sinks:
        await sink.done.wait()
    await cluster.close()
    recorder.close()
    summary = replay(path)
    assert (summary.accepted, summary.plans >= 24) == (8, True)


def test_nothing_of_a_prompt_is_in_it(path):
    def lines() -> Iterator[str]:
        harness, recorder = recorded(path)
        harness.accept("a", [7, 7, 7, 7, 7, 7], cache_salt="hush")
        harness.run()
        recorder.close()
        return [str(record) for record in read_records(path) if record[0] in ("submit", "apply")]

    first, again = lines(), lines()
    assert "hush" not in "".join(first)
    assert first[0] != again[0]  # the key is another one each time
    prompt = replay_module.b64decode(list(read_records(path))[2][3])
    names = np.frombuffer(prompt, "<i4")
    assert len(set(names.tolist())) == 6  # equal tokens are not equal in it
    assert names.min() >= 1 << 30


def test_tokens_are_kept_where_that_is_asked_for(path):
    recorder = Recorder(RecordingWriter(path), keep_tokens=True)
    harness = Harness(workers=0)
    harness.core = harness.scheduler = recorder.new_core(harness.config)
    harness.add_worker("w0")
    harness.accept(
        "a", [7, 0, 7, 9], cache_salt="hush", max_tokens=20, eos_token_ids=frozenset(range(0, 64, 3))
    )
    harness.run()
    recorder.close()
    records = list(read_records(path))
    assert np.frombuffer(replay_module.b64decode(records[2][3]), "<i4").tolist() == [7, 0, 7, 9]
    given = [token for record in records if record[0] == "apply" for token in record[5]]
    assert given == harness.seen["a", 0].tokens
    assert "hush" not in str(records)
    assert replay(path).plans == len(harness.plans)


def test_another_decision_is_a_difference_with_its_place(path, monkeypatch):
    harness, recorder = recorded(path, num_blocks=17)
    storm(harness, 0)
    recorder.close()

    class OtherScheduler(Scheduler):
        def __init__(self, config):
            super().__init__(config)
            self._planner._config = config
            self._intake._hasher = None  # no prefix is found any more

    monkeypatch.setattr(replay_module, "Scheduler", OtherScheduler)
    with pytest.raises(
        ReplayMismatchError, match=r"call \d+, plan of w0 at .*: plan \d+ with \d+ rows; recorded"
    ):
        replay(path)


@pytest.mark.parametrize("share", [0.0005, 0.3, 0.5, 0.99])
def test_a_file_that_is_cut_says_where(path, monkeypatch, capsys, share):
    monkeypatch.setattr("scheduler_service.recording_file._FRAME_BYTES", 4_000)
    harness, recorder = recorded(path)
    storm(harness, 0)
    recorder.close()
    whole = path.read_bytes()
    records = list(read_records(path))
    path.write_bytes(whole[: int(len(whole) * share)])
    given = []
    with pytest.raises(RecordingError) as caught:
        given.extend(read_records(path))
    assert given == records[: len(given)]
    if share > 0.01:
        assert f"of {int(len(whole) * share):,}, after {len(given):,} whole records" in str(caught.value)
    assert command(monkeypatch, path) == 2
    assert str(path) in capsys.readouterr().err.replace("\n", "")
    if share > 0.01:
        assert command(monkeypatch, path, "--partial") == 0
        assert f"of {len(given)} calls" in capsys.readouterr().out


def test_a_changed_byte_is_damage(path):
    harness, recorder = recorded(path)
    harness.accept("a", 4)
    harness.run()
    recorder.close()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    first = content.index(b"\n") + 1
    with pytest.raises(RecordingError, match=f"is damaged: the frame at byte {first}"):
        list(read_records(path))


def test_other_files_are_no_recordings(path, monkeypatch, capsys):
    path.write_bytes(zlib.compress(b"something"))
    with pytest.raises(RecordingError, match="is not a recording"):
        replay(path)
    assert command(monkeypatch, path, "--partial") == 2
    assert command(monkeypatch, path.parent / "nothing") == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"tidegate recording 1", "of format 1 by an early version; this is"),
        (b"tidegate recording 3 9.9.9", "of format 3 by 9.9.9; this is"),
    ],
)
def test_a_recording_of_another_format_is_refused_with_the_version_that_wrote_it(
    path, monkeypatch, capsys, header, told
):
    RecordingWriter(path).close()
    path.write_bytes(header + path.read_bytes()[path.read_bytes().index(b"\n") :])
    assert command(monkeypatch, path) == 2
    assert told in (said := capsys.readouterr().err) and "plays format 2" in said


def test_a_difference_from_another_versions_recording_names_both_versions(path, monkeypatch):
    harness, recorder = recorded(path)
    harness.accept("a", 4)
    harness.run()
    recorder.close()
    records = list(read_records(path))
    plan = next(record for record in records if record[0] == "plan" and record[3] is not None)
    plan[3] ^= 1
    with monkeypatch.context() as patch:
        patch.setattr("scheduler_service.recording_file.OWN_VERSION", "0.0.1")
        writer = RecordingWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    with pytest.raises(ReplayMismatchError, match=r"another one; the recording is by version 0\.0\.1 and"):
        replay(path)


def test_what_this_version_does_not_know_of_is_named(path):
    writer = RecordingWriter(path)
    writer.write(["new", {"max_num_seqs": 4, "moon_phase": 1}])
    writer.close()
    with pytest.raises(RecordingError, match="SchedulerConfig that this version does not know: moon_phase"):
        replay(path)


def test_the_command_says_what_came_out(path, monkeypatch, capsys):
    harness, recorder = recorded(path)
    harness.accept("a", 4, max_tokens=2)
    harness.run()
    recorder.close()
    assert command(monkeypatch, path) == 0
    assert "identical: 2 plans of" in capsys.readouterr().out


async def test_a_recording_of_a_killed_process_plays_up_to_the_last_second(path, monkeypatch, capsys):
    worker = FakeWorker()
    await worker.start()
    flags = ("--worker", worker.address, "--record", str(path))
    async with ServiceProcess(path.parent, *flags) as service:
        await until_health(service.channel, "tidegate.inference.v1.InferenceService", SERVING)
        await read(service.stub.Generate(generate(5)))
        worker.step_delay_s = 60.0
        left = service.stub.Generate(generate(400))
        await left.initial_metadata()
        async with asyncio.timeout(20):
            while [record[0] for record in read_records(path)].count("submit") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        service.process.kill()
        await service.process.wait()
        left.cancel()
    await worker.stop()
    summary = replay(path)
    assert (summary.accepted, summary.unfinished) == (2, 1)
    assert command(monkeypatch, path) == 0
    assert "the recording ends abruptly: 1 request unfinished" in capsys.readouterr().out
