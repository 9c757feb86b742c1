"""Watching a scheduler: what the updates add up to, and `tidegate status --watch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc
from tidegate_client.admin import AdminClient
from tidegate_client.cli.app import app
from tidegate_client.errors import InvalidRequestError
from tidegate_client.watched_state import WatchedState

_ANY = {"model": "m", "tenant": "t", "priority": 0}


def updates() -> list[pb.WatchStateResponse]:
    """Two requests on a worker and one behind them; one ends, and the last one runs; the worker goes."""
    requests = [
        pb.RequestState(request_id=f"r{key}", key=key, status=pb.REQUEST_STATUS_RUNNING) for key in range(2)
    ]
    requests.append(pb.RequestState(request_id="r2", key=2, status=pb.REQUEST_STATUS_WAITING))
    return [
        pb.WatchStateResponse(
            sequence=7,
            snapshot=True,
            version="0.1.0",
            waiting_requests=1,
            running_requests=2,
            counters=pb.Counters(requests_finished=5),
            workers=[pb.WorkerState(worker_id="w1", status=pb.WORKER_STATUS_READY, num_slots=2)],
            queues=[pb.QueueState(**_ANY, waiting_requests=1, running_requests=2)],
            heads=[
                pb.QueueHead(model="m", request_id="r2", blockers=[pb.Blocker(text="2 of at most 2 run")])
            ],
            requests=requests,
        ),
        pb.WatchStateResponse(
            sequence=8,
            running_requests=2,
            counters=pb.Counters(requests_finished=6),
            queues=[pb.QueueState(**_ANY, running_requests=2)],
            heads=[pb.QueueHead(model="m")],
            requests=[pb.RequestState(request_id="r2", key=2, status=pb.REQUEST_STATUS_RUNNING)],
            progress=pb.RequestProgress(
                keys=[1, 2], output_tokens=[9, 1], computed_tokens=[20, 5], blocks=[2, 1]
            ),
            ended_keys=[0],
        ),
        pb.WatchStateResponse(
            sequence=9, queues=[pb.QueueState(**_ANY)], ended_keys=[1, 2], removed_worker_ids=["w1"]
        ),
    ]


class FakeAdmin(pb_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.asked: list[pb.WatchStateRequest] = []
        self.ended = False

    def WatchState(self, request, context) -> Iterator[pb.WatchStateResponse]:
        self.asked.append(request)
        if request.interval_ms < 100:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "interval_ms: 1 is not allowed")
        context.add_callback(lambda: setattr(self, "ended", True))
        yield from updates()


@pytest.fixture
def admin(monkeypatch) -> Iterator[FakeAdmin]:
    server, fake = grpc.server(ThreadPoolExecutor(2)), FakeAdmin()
    pb_grpc.add_AdminServiceServicer_to_server(fake, server)
    monkeypatch.setenv("TIDEGATE_ADDRESS", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield fake
    server.stop(None).wait()


def test_updates_add_up():
    seen = WatchedState()
    first, second, third = updates()
    seen.apply(first)
    assert (seen.version, sorted(seen.requests), list(seen.workers)) == ("0.1.0", [0, 1, 2], ["w1"])
    assert seen.heads["m"].blockers[0].text == "2 of at most 2 run"
    seen.apply(second)
    assert (seen.totals.sequence, seen.counters.requests_finished, list(seen.workers)) == (8, 6, ["w1"])
    assert {key: (r.output_tokens, r.computed_tokens, r.blocks) for key, r in seen.requests.items()} == {
        1: (9, 20, 2),
        2: (1, 5, 1),
    }
    assert seen.queues["m", "t", 0].running_requests == 2
    seen.apply(third)
    assert (seen.requests, seen.queues, seen.workers, seen.counters.requests_finished) == ({}, {}, {}, 6)
    seen.apply(updates()[0])
    assert (sorted(seen.requests), seen.counters.requests_finished) == ([0, 1, 2], 5)


def test_a_client_watches_until_it_is_closed(admin):
    with AdminClient() as client:
        watched = client.watch(interval_ms=250, steps=True)
        assert next(watched).snapshot
        watched.close()
        with pytest.raises(InvalidRequestError):
            next(client.watch(interval_ms=1))
    assert (admin.asked[0].interval_ms, admin.asked[0].steps) == (250, True)


def test_status_is_shown_live(admin):
    result = CliRunner().invoke(app, ["status", "--watch", "--requests"])
    assert result.exit_code == 0, result.output
    assert "2 running, 1 waiting" in result.output
    assert "next of m is r2: 2 of at most 2 run" in result.output
    assert "0 running, 0 waiting" in result.output


def test_each_update_is_a_line_of_json(admin):
    result = CliRunner().invoke(app, ["status", "--watch", "--json"])
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["sequence"] for line in lines] == ["7", "8", "9"]
    assert lines[1]["progress"]["output_tokens"] == [9, 1]


def test_invariants_are_checked_once_only(admin):
    result = CliRunner().invoke(app, ["status", "--watch", "--verify"])
    assert result.exit_code != 0
    assert admin.asked == []
