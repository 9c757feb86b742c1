"""Workers over real gRPC that die, hang, lie, move and come back. Every request still gets its own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from engine_harness import Cluster, submit_many
from fake_worker import FakeWorker, Faults

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import FinishReason
from scheduler_service.core.sampling import SamplingParams
from scheduler_service.worker_link import LinkOptions
from scheduler_service.workers import WorkerStatus
from tidegate.worker.v1 import worker_pb2 as pb


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


@pytest.fixture
async def impatient() -> AsyncIterator[Cluster]:
    options = LinkOptions(hello_timeout_s=0.3, step_timeout_s=0.3, max_backoff_s=0.1)
    cluster = Cluster(options=options)
    yield cluster
    await cluster.close()


async def test_requests_get_the_workers_tokens(cluster):
    worker = await cluster.add(FakeWorker())
    submit_many(cluster, 20)
    cluster.submit("three", n=3, prompt=9)
    cluster.submit("logprobs", sampling=SamplingParams(seed=5, logprobs=1))
    await cluster.finish()
    assert cluster.engine.state().counters.requests_finished == 24
    assert worker.streams == 1


async def test_plans_are_pipelined(cluster):
    """With results held back, the second plan is at the worker before the first is answered."""
    worker = await cluster.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    cluster.submit("r1")
    await cluster.until(lambda: cluster.engine.state().workers[0].steps_in_flight == 2)
    assert [plan.seq for plan in worker.plans] == [1]


async def test_memory_pressure_preempts_and_loses_nothing(cluster):
    await cluster.add(FakeWorker(num_blocks=25))
    submit_many(cluster, 10, max_tokens=30)
    await cluster.finish()
    assert cluster.engine.state().counters.preemptions > 0


@pytest.mark.parametrize("seq", [1, 2, 5])
async def test_a_worker_that_fails_in_a_step_is_dialled_again(cluster, seq):
    worker = await cluster.add(FakeWorker(faults=Faults(die_at_seq=seq)))
    sinks = submit_many(cluster)
    await cluster.finish()
    assert worker.streams == 2
    assert any("Preempted" in sink.kinds for sink in sinks)
    assert cluster.engine.state().counters.requests_moved > 0


async def test_a_killed_worker_that_restarts_finishes_what_it_had(cluster):
    worker = await cluster.add(FakeWorker(step_delay_s=0.005))
    submit_many(cluster, max_tokens=20)
    await cluster.until(lambda: len(worker.plans) >= 6)
    await worker.stop()
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.CONNECTING)
    assert not cluster.engine.ready
    reborn = FakeWorker()
    await reborn.start(worker.port)
    cluster.workers.append(reborn)
    await cluster.finish()
    assert reborn.streams == 1
    assert cluster.record(worker).info.incarnation == reborn.incarnation


async def test_another_worker_takes_over_from_one_that_is_gone(cluster):
    first = await cluster.add(FakeWorker(step_delay_s=0.005))
    sinks = submit_many(cluster, max_tokens=20)
    await cluster.until(lambda: len(first.plans) >= 4)
    second = await cluster.add(FakeWorker())
    await first.stop()
    await cluster.finish()
    assert second.plans
    assert all(sink.finished[0].usage.preemptions <= 1 for sink in sinks)
    assert [state.worker_id for state in cluster.engine.state().workers] == [second.address]


async def test_a_worker_lost_before_its_first_result_loses_nothing(cluster):
    worker = await cluster.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    submit_many(cluster)
    await cluster.until(lambda: worker.plans)
    await worker.stop()
    await cluster.add(FakeWorker())
    await cluster.finish()


async def test_a_hung_worker_is_fenced_and_its_requests_move(impatient):
    hung = await impatient.add(FakeWorker(faults=Faults(stall_at_seq=3)))
    submit_many(impatient)
    await impatient.until(lambda: len(hung.plans) >= 3)
    healthy = await impatient.add(FakeWorker())
    await impatient.finish()
    assert healthy.plans
    assert impatient.engine.state().counters.requests_moved > 0
    # The stream that hung is over, and what the worker does now belongs to a new one with a higher epoch.
    await impatient.until(lambda: hung.streams > 1)
    epochs = [hello.scheduler_epoch for hello in hung.hellos]
    assert epochs == sorted(set(epochs))


async def test_the_watchdog_names_the_timeout(impatient):
    worker = await impatient.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    impatient.submit("r1", queue_timeout_s=None)
    await impatient.until(lambda: "step timeout" in impatient.record(worker).last_error)
    assert "2 steps unanswered" in impatient.record(worker).last_error
    worker.faults.stall_at_seq = None
    await impatient.finish()


async def test_slow_steps_are_not_overdue_while_they_make_progress(impatient):
    worker = await impatient.add(FakeWorker(step_delay_s=0.05))
    impatient.submit("r1", max_tokens=12)  # twice the timeout in all
    await impatient.finish()
    assert worker.streams == 1


async def test_a_worker_that_does_not_say_hello_is_given_up(impatient):
    worker = await impatient.add(FakeWorker(faults=Faults(silent_hello=True)), ready=False)
    await impatient.until(lambda: "no hello within 0.3 s" in impatient.record(worker).last_error)
    worker.faults.silent_hello = False
    await impatient.until(lambda: impatient.status(worker) is WorkerStatus.READY)


def edit_model(name: str, value: object) -> Callable[[pb.WorkerHello], None]:
    return lambda hello: setattr(hello.model, name, value)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda hello: setattr(hello, "protocol_version", 2), "protocol version 2"),
        (lambda hello: setattr(hello, "scheduler_epoch", 1), "epoch 1"),
        (lambda hello: setattr(hello, "block_size", 12), "power of two"),
        (lambda hello: setattr(hello, "num_slots", 0), "num_slots = 0"),
        (edit_model("name", ""), "model name"),
        (edit_model("vocab_size", 0), "vocab_size = 0"),
    ],
)
async def test_hellos_that_do_not_match_are_refused_with_a_reason(cluster, edit, complaint):
    worker = await cluster.add(FakeWorker(faults=Faults(edit_hello=edit)), ready=False)
    await cluster.until(lambda: complaint in cluster.record(worker).last_error)
    assert cluster.record(worker).last_error.startswith("refused: ")
    assert cluster.engine.models() == {}
    assert not cluster.engine.ready
    worker.faults.edit_hello = None
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.READY)


def bad_bytes(result: pb.StepResult) -> None:
    result.slots = b"\0"


def bad_length(result: pb.StepResult) -> None:
    result.token_ids += b"\0\0\0\0"


def bad_token(result: pb.StepResult) -> None:
    result.token_ids = np.full(len(result.token_ids) // 4, 1000, "<i4").tobytes()


def bad_slot(result: pb.StepResult) -> None:
    result.slots = np.full(len(result.slots) // 4, 63, "<i4").tobytes()


def bad_seq(result: pb.StepResult) -> None:
    result.seq += 1


def missing_rows(result: pb.StepResult) -> None:
    result.slots = result.token_ids = b""


@pytest.mark.parametrize("edit", [bad_bytes, bad_length, bad_token, bad_slot, bad_seq, missing_rows])
async def test_malformed_results_end_the_stream_and_nothing_else(cluster, edit):
    liar = FakeWorker()

    def once(result: pb.StepResult) -> None:
        if result.seq == 3 and liar.streams == 1:
            edit(result)

    liar.faults.edit_result = once
    await cluster.add(liar)
    sinks = submit_many(cluster)
    await cluster.finish()
    assert liar.streams == 2
    assert all(sink.kinds == ["Admitted", "Preempted", "Resumed", "Finished"] for sink in sinks)


async def test_requests_wait_for_a_worker_up_to_their_queue_timeout(cluster):
    worker = await cluster.add(FakeWorker())
    await worker.stop()
    await cluster.until(lambda: not cluster.engine.ready)
    sink = cluster.submit("r1", queue_timeout_s=0.05)
    async with asyncio.timeout(5):
        await sink.done.wait()
    assert sink.reason is FinishReason.QUEUE_TIMEOUT


@pytest.mark.parametrize("seed", range(4))
async def test_random_deaths_lose_no_token_and_repeat_none(seed):
    rng = np.random.default_rng(seed)
    cluster = Cluster(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48))
    for _ in range(2):
        await cluster.add(FakeWorker(num_blocks=60, step_delay_s=0.001))
    for i in range(24):
        cluster.submit(f"r{i}", prompt=int(rng.integers(1, 60)), max_tokens=int(rng.integers(1, 40)))
    cluster.submit("n", n=4, prompt=21)
    for _ in range(5):
        await asyncio.sleep(float(rng.uniform(0.01, 0.05)))
        worker = cluster.workers[int(rng.integers(2))]
        port = worker.port
        await worker.stop()
        await worker.start(port)
    await cluster.finish()
    await cluster.close()


async def test_a_bug_while_a_result_is_read_ends_the_stream_and_is_logged(cluster, monkeypatch, caplog):
    worker = await cluster.add(FakeWorker())
    with monkeypatch.context() as patch:
        patch.setattr("scheduler_service.worker_link.decode_timings", lambda message: 1 / 0)
        cluster.submit("r1")
        await cluster.until(lambda: "incident" in cluster.record(worker).last_error)
    fault = next(record for record in caplog.records if record.message == "link_fault")
    assert fault.fields["incident_id"] in cluster.record(worker).last_error
    assert "ZeroDivisionError" in fault.fields["exception"]
    await cluster.finish()
