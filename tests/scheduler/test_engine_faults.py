"""Bugs and broken rules in the engine's loop: who ends by them, and who goes on."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from engine_harness import FakeLink, FakeSink, done, spec, submit

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import InvariantError
from scheduler_service.core.events import FinishReason
from scheduler_service.core.step import StepResult
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.engine import Engine
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


async def test_events_of_planning_come_before_the_end_that_a_bug_causes(engine, link, monkeypatch):
    sink, _ = submit(engine, "r1")
    monkeypatch.setattr(link, "send", lambda plan: 1 / 0)
    await asyncio.sleep(0.01)
    assert sink.kinds == ["Admitted", "Preempted", "Finished"]
    assert sink.reason is FinishReason.ERROR
    assert engine.violations() == []
