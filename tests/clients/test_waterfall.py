"""`tidegate trace` and the phases that it draws."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc
from tidegate_client.cli.app import app
from tidegate_client.cli.trace import picture
from tidegate_client.waterfall import waterfall


def entry(at_s: float, event: str, worker: str = "", step: int = 0, detail: str = "") -> pb.TimelineEntry:
    return pb.TimelineEntry(at_seconds=at_s, event=event, worker_id=worker, step_sequence=step, detail=detail)


def ended() -> pb.CandidateExplanation:
    """Waits 1 s, computes its prompt in three chunks, decodes, is moved, and decodes on."""
    return pb.CandidateExplanation(
        state=pb.RequestState(
            request_id="r", status=pb.REQUEST_STATUS_FINISHED, prompt_tokens=20, output_tokens=11, tenant="t"
        ),
        finish_reason="length",
        timeline=[
            entry(0.0, "queued"),
            entry(1.0, "admitted", "w0", 4, "0 cached tokens"),
            entry(4.0, "first_token", "", 6),
            entry(6.0, "preempted", "w0", 9, "worker_lost"),
            entry(7.0, "resumed", "w1", 2, "0 cached tokens"),
            entry(10.0, "finished", "w1", 8, "length"),
        ],
        chunks=pb.PrefillChunks(
            at_seconds=[1.0, 1.5, 3.0, 7.0],
            ended_seconds=[2.0, 3.0, 4.0, 7.5],
            step_sequences=[4, 5, 6, 2],
            tokens=[8, 8, 4, 24],
        ),
    )


def test_a_restored_request_goes_on_without_a_first_token():
    candidate = ended()
    del candidate.timeline[3:5], candidate.timeline[2]
    detail = "from the journal with 6 tokens; times count from here"
    candidate.timeline[0].CopyFrom(entry(0.0, "restored", detail=detail))
    fall = waterfall(candidate)
    assert [(p.name, p.start_s, p.end_s) for p in fall.phases] == [("queue", 0.0, 1.0), ("decode", 1.0, 10.0)]
    assert (fall.first_token_s, fall.between_tokens_s, fall.restored) == (None, None, detail)


def test_a_chunk_without_a_result_lasts_to_the_end_of_its_phase():
    candidate = ended()
    candidate.chunks.ended_seconds[:] = [2.0, 3.0, 0.0, 0.0]
    phases = waterfall(candidate).phases
    assert [(c.start_s, c.end_s) for c in phases[1].chunks] == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert [(c.start_s, c.end_s) for c in phases[4].chunks] == [(7.0, 10.0)]


def test_phases_fill_the_time_of_a_request():
    fall = waterfall(ended())
    assert [(p.name, p.start_s, p.end_s, p.worker_id, p.first_step, p.last_step) for p in fall.phases] == [
        ("queue", 0.0, 1.0, "", 0, 0),
        ("prefill", 1.0, 4.0, "w0", 4, 6),
        ("decode", 4.0, 6.0, "w0", 6, 9),
        ("preempted", 6.0, 7.0, "w0", 0, 0),
        ("decode", 7.0, 10.0, "w1", 2, 8),
    ]
    assert [(c.start_s, c.end_s, c.step, c.tokens) for c in fall.phases[1].chunks] == [
        (1.0, 2.0, 4, 8),
        (2.0, 3.0, 5, 8),
        (3.0, 4.0, 6, 4),
    ]
    # Tokens that are computed again take one step of the rest of the time.
    assert [(c.start_s, c.end_s, c.step, c.tokens) for c in fall.phases[4].chunks] == [(7.0, 7.5, 2, 24)]
    assert (fall.total_s, fall.first_token_s, fall.between_tokens_s) == (10.0, 4.0, 0.5)


def test_a_token_that_comes_after_its_preemption_ends_no_phase():
    candidate = ended()
    candidate.timeline[2].at_seconds = 6.5
    candidate.timeline.insert(3, candidate.timeline.pop(2))
    assert [phase.name for phase in waterfall(candidate).phases] == [
        "queue",
        "prefill",
        "preempted",
        "decode",
    ]


def test_a_live_one_has_no_end_yet():
    waiting = pb.CandidateExplanation(
        state=pb.RequestState(request_id="r", age_seconds=2.5), timeline=[entry(0.0, "queued")]
    )
    fall = waterfall(waiting)
    assert [(phase.name, phase.end_s) for phase in fall.phases] == [("queue", 2.5)]
    assert (fall.first_token_s, fall.between_tokens_s) == (None, None)


def test_bars_are_where_their_time_is():
    console = Console(width=103)  # leaves 40 for the bars: 4 a second
    with console.capture() as capture:
        console.print(picture(ended(), console.width))
    drawn = [line for line in capture.get().splitlines() if "█" in line or "▪" in line]
    lines = {line.split()[0]: line for line in reversed(drawn)}
    assert "total 10000 ms   time to first token 4000 ms   between tokens 500 ms" in capture.get()
    start = lines["queue"].index("█")
    for name, first, length in (("queue", 0, 4), ("prefill", 4, 12), ("decode", 16, 8), ("preempted", 24, 4)):
        assert lines[name].index("█") - start == first
        assert lines[name].count("█") == length
    assert "step 4 to 6, 0 cached tokens" in lines["prefill"]
    assert "step 4, 8 tokens" in lines["chunk"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_numbers_are_never_cut(width):
    candidate = ended()
    for entry_ in candidate.timeline:
        entry_.at_seconds *= 123.4567
    console = Console(width=width)
    with console.capture() as capture:
        console.print(picture(candidate, console.width))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    drawn = [line for line in lines if "█" in line]
    numbers = [re.search(r"([\d.]+ s) +([\d.]+ m?s)", line).groups() for line in drawn]
    assert numbers == [
        ("0.000 s", "123.5 s"),
        ("123.457 s", "370.4 s"),
        ("493.827 s", "246.9 s"),
        ("740.740 s", "123.5 s"),
        ("864.197 s", "370.4 s"),
    ]
    assert any("decode 617.3 s" in line for line in lines)  # in the sums


class FakeAdmin(pb_grpc.AdminServiceServicer):
    def ExplainRequest(self, request, context) -> pb.ExplainRequestResponse:
        if request.request_id != "r":
            context.abort(grpc.StatusCode.NOT_FOUND, "nothing is known of it")
        return pb.ExplainRequestResponse(candidates=[ended()])


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_AdminServiceServicer_to_server(FakeAdmin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_the_command_draws_and_prints_json(address):
    drawn = CliRunner().invoke(app, ["trace", "r", "--address", address])
    assert drawn.exit_code == 0, drawn.output
    assert "r  finished: length, 20 prompt and 11 output tokens, tenant t" in drawn.output
    (content,) = json.loads(CliRunner().invoke(app, ["trace", "r", "--json", "-a", address]).output)
    assert (content["first_token_s"], len(content["phases"])) == (4.0, 5)
    assert content["phases"][1]["chunks"][2] == {"start_s": 3.0, "end_s": 4.0, "step": 6, "tokens": 4}
    assert CliRunner().invoke(app, ["trace", "x", "-a", address]).exit_code != 0
