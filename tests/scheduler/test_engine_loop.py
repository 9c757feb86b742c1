from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from engine_harness import Cluster, FakeLink, FakeSink, outputs_of, spec

from scheduler_service.core.admission import Accepted, RefusalReason, Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import InvariantError
from scheduler_service.core.events import FinishReason
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import StepResult
from scheduler_service.core.step_time import row_size
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.engine import Engine
from scheduler_service.engine import _log as engine_log
from scheduler_service.plan_codec import StepTimings
from scheduler_service.workers import WorkerRegistry, WorkerStatus

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


def submit(engine: Engine, request_id: str, **fields) -> tuple[FakeSink, list[int]]:
    sink = fields.pop("sink", None) or FakeSink(n=fields.get("n", 1))
    request = spec(request_id, sink, **fields)
    assert isinstance(engine.submit(request), Accepted)
    return sink, outputs_of(request)


async def done(*sinks: FakeSink) -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*(sink.done.wait() for sink in sinks))


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


async def test_a_sink_that_fails_ends_only_its_own_request(engine, link, caplog):
    sink = FakeSink(on_token=lambda index, token: 1 / 0)
    submit(engine, "r1", sink=sink)
    other, expected = submit(engine, "r2")
    await done(sink, other)
    assert sink.reason is FinishReason.ERROR
    assert other.tokens[0] == expected
    assert other.reason is FinishReason.LENGTH
    assert "sink_failed" in [record.message for record in caplog.records]
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


async def test_a_result_that_answers_no_plan_drops_the_worker_and_requeues(engine, registry, link):
    link.held = True
    sink, expected = submit(engine, "r1")
    await asyncio.sleep(0)
    wrong = StepResult(seq=99, slots=np.zeros(1, np.int32), token_ids=np.zeros(1, np.int32))
    engine.step_done("w1", wrong, TIMINGS)
    assert "99" in link.aborted[0]
    assert registry.get("w1").status is WorkerStatus.CONNECTING
    assert "99" in registry.get("w1").last_error
    assert engine.state().waiting_requests == 1
    link.release()  # what still comes from the old stream is not applied
    assert sink.tokens == {}

    again = FakeLink(engine, registry)
    again.connect()
    await done(sink)
    assert sink.tokens[0] == expected
    assert sink.kinds == ["Admitted", "Preempted", "Resumed", "Finished"]


async def test_rows_that_failed_end_with_an_error_and_no_detail_is_lost(engine, link, caplog):
    caplog.set_level(logging.ERROR)
    link.held = True
    sink, _ = submit(engine, "r1")
    await asyncio.sleep(0)
    row = link.plans[0].slots
    engine.step_done("w1", StepResult(1, row, np.zeros(1, np.int32), frozenset([0])), TIMINGS)
    assert sink.reason is FinishReason.ERROR
    assert "not finite" in caplog.records[-1].fields["detail"]


async def test_a_bug_while_planning_ends_the_requests_of_that_worker_only(
    engine, registry, link, monkeypatch
):
    other_link = FakeLink(engine, registry, "w2")
    link.held = other_link.held = True
    here, _ = submit(engine, "r1")
    await asyncio.sleep(0)
    other_link.connect()
    there, expected = submit(engine, "r2")
    await asyncio.sleep(0)
    assert [state.worker_id for state in engine.requests(-1, 10)] == ["w1", "w2"]

    plan = engine._core.plan
    monkeypatch.setattr(
        engine._core, "plan", lambda worker_id, now: 1 / 0 if worker_id == "w1" else plan(worker_id, now)
    )
    link.release()
    other_link.release()
    await done(here, there)
    assert here.reason is FinishReason.ERROR
    assert "incident" in here.finished[0].detail
    assert there.tokens[0] == expected
    assert "incident" in link.aborted[0]
    assert engine.violations() == []


async def test_a_bug_while_applying_a_result_is_contained(engine, registry, link, monkeypatch):
    link.held = True
    sink, _ = submit(engine, "r1")
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "apply", lambda *_: 1 / 0)
        link.release()
    assert sink.reason is FinishReason.ERROR
    FakeLink(engine, registry).connect()
    after, expected = submit(engine, "r2")
    await done(after)
    assert after.tokens[0] == expected


async def test_broken_invariants_end_all_requests_and_a_new_core_begins(engine, registry, link, monkeypatch):
    link.held = True
    sinks = [submit(engine, f"r{i}")[0] for i in range(3)]
    await asyncio.sleep(0)

    def broken() -> None:
        raise InvariantError(["block 7 is nobody's"])

    monkeypatch.setattr(engine._core, "apply", lambda *_: 1 / 0)
    monkeypatch.setattr(engine._core, "check", broken)
    link.release()
    assert [sink.reason for sink in sinks] == [FinishReason.ERROR] * 3
    assert not engine.ready
    assert engine.violations() == []
    FakeLink(engine, registry).connect()
    after, expected = submit(engine, "r9")
    await done(after)
    assert after.tokens[0] == expected


async def test_a_bug_at_submit_is_told_by_an_incident(engine, link, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "submit", lambda *_: 1 / 0)
        with pytest.raises(EngineFaultError) as caught:
            engine.submit(spec("r1", FakeSink()))
    fault = next(record for record in caplog.records if record.message == "core_fault")
    assert fault.fields["incident_id"] == caught.value.incident_id
    assert fault.exc_info is not None
    sink, expected = submit(engine, "r1")
    await done(sink)
    assert sink.tokens[0] == expected


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


async def test_events_of_planning_come_before_the_end_that_a_bug_causes(engine, link, monkeypatch):
    sink, _ = submit(engine, "r1")
    monkeypatch.setattr(link, "send", lambda plan: 1 / 0)
    await asyncio.sleep(0.01)
    assert sink.kinds == ["Admitted", "Preempted", "Finished"]
    assert sink.reason is FinishReason.ERROR
    assert engine.violations() == []


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
