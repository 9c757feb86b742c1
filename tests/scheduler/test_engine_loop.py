"""The engine's one loop: what comes in is planned, what comes back is handed out, and idle is idle."""

from __future__ import annotations

import asyncio

import pytest
from engine_harness import Cluster, FakeLink, FakeSink, done, outputs_of, spec, submit

from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import FinishReason
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step_time import row_size
from scheduler_service.engine import Engine
from scheduler_service.engine import _log as engine_log
from scheduler_service.plan_codec import StepTimings
from scheduler_service.workers import WorkerRegistry

TIMINGS = StepTimings(0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def registry() -> WorkerRegistry:
    return WorkerRegistry()


@pytest.fixture
def engine(registry) -> Engine:
    return Engine(SchedulerConfig(max_num_seqs=32), registry)


@pytest.fixture
async def link(engine, registry) -> FakeLink:
    link = FakeLink(engine, registry)
    link.connect()
    return link


async def test_submits_of_one_turn_share_one_plan(engine, link):
    sinks = [submit(engine, f"r{i}")[0] for i in range(10)]
    assert link.plans == []
    await done(*sinks)
    assert len(link.plans[0].admitted) == 10
    assert len(link.plans) == 8  # one for the prompts and the first token, one for each other token


async def test_events_come_in_order_and_tokens_are_those_of_the_worker(engine, link):
    sink, expected = submit(engine, "r1", max_tokens=5)
    await done(sink)
    assert sink.tokens[0] == expected
    assert sink.kinds == ["Admitted", "Finished"]
    finished = sink.finished[0]
    assert finished.reason is FinishReason.LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (10, 5)
    assert engine.state().counters.output_tokens == 5
    assert engine.violations() == []


async def test_candidates_of_one_request_get_their_own_tokens(engine, link):
    sink = FakeSink(n=3)
    request = spec("r1", sink, n=3)
    engine.submit(request)
    await done(sink)
    assert sink.tokens == {index: outputs_of(request, index) for index in range(3)}
    assert sink.kinds.count("Finished") == 3


async def test_logprobs_reach_the_sink(engine, link):
    sink, _ = submit(engine, "r1", max_tokens=3, sampling=SamplingParams(seed=1, logprobs=2))
    await done(sink)
    assert [entry.sampled for entry in sink.logprobs] == [-0.5] * 3
    assert [entry.top[0][0] for entry in sink.logprobs] == sink.tokens[0]
    assert all(len(entry.top) == 2 for entry in sink.logprobs)


async def test_cancel_ends_a_running_request_and_frees_its_blocks(engine, link):
    link.held = True
    sink, _ = submit(engine, "r1")
    await asyncio.sleep(0)
    assert engine.cancel("r1")
    assert sink.reason is FinishReason.CANCELLED
    assert engine.state().workers[0].blocks_used == 0
    assert not engine.cancel("r1")
    link.release()
    await asyncio.sleep(0.01)
    assert sink.tokens == {}
    assert engine.violations() == []


async def test_cancel_of_one_candidate_leaves_the_others(engine, link):
    sink = FakeSink(n=2)
    request = spec("r1", sink, n=2)
    engine.submit(request)
    assert engine.cancel("r1", 0)
    assert not engine.cancel("r1", 7)
    await done(sink)
    assert sink.finished[0].reason is FinishReason.CANCELLED
    assert sink.tokens[1] == outputs_of(request, 1)


async def test_a_sink_may_stop_its_request_while_tokens_are_handed_out(engine, link):
    sink = FakeSink()
    sink.on_token = lambda index, token: len(sink.tokens[0]) == 3 and engine.stop("r1", 0, 3)
    submit(engine, "r1", sink=sink, max_tokens=50)
    other, expected = submit(engine, "r2")
    await done(sink, other)
    assert sink.reason is FinishReason.STOP
    assert sink.finished[0].usage.output_tokens == 3
    assert other.tokens[0] == expected
    assert engine.violations() == []


async def test_the_queue_timeout_ends_a_request_that_no_worker_takes(engine, link):
    engine.worker_lost("w1", "gone")
    sink, _ = submit(engine, "r1", queue_timeout_s=0.02)
    await done(sink)
    assert sink.reason is FinishReason.QUEUE_TIMEOUT
    assert engine.state().waiting_requests == 0


async def test_a_deadline_ends_a_running_request(engine, link):
    link.held = True
    late, _ = submit(engine, "r1", deadline=engine.now() + 0.02)
    later, _ = submit(engine, "r2", deadline=engine.now() + 0.04)
    await done(late, later)
    assert [late.reason, later.reason] == [FinishReason.DEADLINE, FinishReason.DEADLINE]
    assert engine.state().workers[0].blocks_used == 0


async def test_an_earlier_deadline_is_not_kept_waiting_by_a_later_one(engine, link):
    link.held = True
    submit(engine, "r1", deadline=engine.now() + 1_000)
    await asyncio.sleep(0)
    soon, _ = submit(engine, "r2", deadline=engine.now() + 0.02)
    await done(soon)
    assert soon.reason is FinishReason.DEADLINE


async def test_refusals_are_returned(engine, link):
    sink = FakeSink()
    assert engine.submit(spec("r1", sink, model="other")).reason is RefusalReason.UNKNOWN_MODEL
    assert engine.submit(spec("r1", sink, max_tokens=600)).reason is RefusalReason.CONTEXT_TOO_LONG
    submit(engine, "r1")
    assert engine.submit(spec("r1", sink)).reason is RefusalReason.DUPLICATE_ID
    engine.start_draining()
    refused = engine.submit(spec("r2", sink))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING
    assert sink.events == []


async def test_refusals_are_logged_with_their_numbers(engine, link, monkeypatch, caplog):
    monkeypatch.setattr(engine_log, "_repeats", {})
    engine.submit(spec("r1", FakeSink(), prompt=500, max_tokens=100))
    (record,) = [each for each in caplog.records if each.message == "request_refused"]
    assert record.fields == {
        "request_id": "r1",
        "reason": "context_too_long",
        "requested": 600,
        "current": 500,
        "limit": 512,
    }


async def test_draining_waits_for_what_was_accepted(engine, link):
    sink, _ = submit(engine, "r1")
    engine.start_draining()
    assert engine.draining
    await asyncio.wait_for(engine.wait_idle(), 5)
    assert sink.reason is FinishReason.LENGTH


async def test_nothing_runs_while_nothing_is_to_be_done(engine, link):
    sink, _ = submit(engine, "r1")
    await done(sink)
    rounds = 0

    def counted() -> None:
        nonlocal rounds
        rounds += 1

    engine.on_round = counted
    await asyncio.sleep(0.05)
    assert rounds == 0


async def test_readiness_follows_workers_and_draining(engine, registry):
    changes: list[bool] = []
    engine.on_ready_change = changes.append
    link = FakeLink(engine, registry)
    link.connect()
    assert engine.models()["fake"].ready_workers == 1
    engine.worker_lost("w1", "gone")
    assert engine.models()["fake"].ready_workers == 0
    link.connect()
    engine.start_draining()
    assert changes == [True, False, True, False]


async def test_the_emptier_worker_gets_the_next_request(engine, registry, link):
    other = FakeLink(engine, registry, "w2")
    other.connect()
    link.held = other.held = True
    for i in range(2):
        submit(engine, f"r{i}")
        await asyncio.sleep(0)
    running = {state.worker_id: state.running_requests for state in engine.state().workers}
    assert running == {"w1": 1, "w2": 1}
    link.release()
    other.release()
    await asyncio.wait_for(engine.wait_idle(), 5)


async def test_a_drained_worker_keeps_its_stream_and_gets_nothing_new(engine, registry, link):
    link.held = True
    sink, expected = submit(engine, "r1")
    await asyncio.sleep(0)
    assert engine.drain_worker("w1") == 1
    assert engine.drain_worker("w1") == 0
    assert not engine.ready
    plans = len(link.plans)
    link.release()
    await asyncio.sleep(0.01)
    assert len(link.plans) == plans
    other = FakeLink(engine, registry, "w2")
    other.connect()
    await done(sink)
    assert sink.tokens[0] == expected
    with pytest.raises(KeyError):
        engine.drain_worker("nobody")


async def test_stop_tokens_end_a_request(engine, link):
    request = spec("r1", FakeSink())
    third = outputs_of(request)[2]
    sink, expected = submit(
        engine, "r1", stopping=StoppingParams(max_tokens=8, stop_token_ids=frozenset([third]))
    )
    await done(sink)
    assert sink.tokens[0] == expected[:3]
    assert (sink.reason, sink.finished[0].stop_token_id) == (FinishReason.STOP, third)


async def test_cluster_without_requests_is_sound():
    cluster = Cluster()
    cluster.check()
    await cluster.close()


async def test_a_target_that_no_step_can_keep_is_told_with_what_is_allowed(registry, caplog):
    engine = Engine(SchedulerConfig(max_num_seqs=32, target_itl_ms=5.0), registry)
    link = FakeLink(engine, registry)
    link.connect()
    model = engine._core._workers["w1"].step_time
    for _ in range(100):
        model.note(row_size(20, 1), 8.0)
    await done(submit(engine, "long", max_tokens=300)[0])
    (record,) = [each for each in caplog.records if each.message == "target_itl_too_low"]
    assert record.fields["target_itl_ms"] == 5.0
    assert record.fields["allowed"].startswith("above 8.0, ")


async def test_a_target_that_can_be_kept_is_not_talked_of(registry, caplog):
    engine = Engine(SchedulerConfig(max_num_seqs=32, target_itl_ms=9.0), registry)
    link = FakeLink(engine, registry)
    link.connect()
    model = engine._core._workers["w1"].step_time
    for _ in range(100):
        model.note(row_size(20, 1), 8.0)
    await done(submit(engine, "long", max_tokens=300)[0])
    assert not [each for each in caplog.records if each.message == "target_itl_too_low"]
