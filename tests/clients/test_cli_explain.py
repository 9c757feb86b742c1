"""What `tidegate explain` says of what has happened to a request."""

from __future__ import annotations

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.cli.explain import _lines


def test_a_request_whose_worker_went_was_moved_and_not_preempted():
    entries = [
        (0.0, "queued", "", ""),
        (1.0, "admitted", "w0", "0 cached tokens"),
        (2.0, "preempted", "w0", "blocks"),
        (3.0, "preempted", "w0", "worker_lost"),
        (4.0, "preempted", "w1", "drain"),
    ]
    candidate = pb.CandidateExplanation(
        state=pb.RequestState(request_id="r", status=pb.REQUEST_STATUS_PREEMPTED),
        timeline=[
            pb.TimelineEntry(at_seconds=at, event=event, worker_id=worker, detail=detail)
            for at, event, worker, detail in entries
        ],
    )
    assert [line.split(maxsplit=2)[2] for line in _lines(candidate)[1:]] == [
        "queued",
        "admitted on w0: 0 cached tokens",
        "preempted on w0: blocks",
        "moved from w0: worker_lost",
        "moved from w1: drain",
    ]
