"""Where a stream goes on for a client that has its beginning."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.candidate_output import Delta, Finished
from scheduler_service.core.events import FinishReason, Timings, Usage
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.generation_stream import Admitted
from scheduler_service.seam import Received, Seam


def finished(index: int) -> Finished:
    return Finished(
        index, FinishReason.LENGTH, None, None, Usage(1, 0, 1, 0), Timings(0.0, 0.0, 0.0, 0.0, None)
    )


def test_a_client_that_has_nothing_gets_everything():
    events = [Admitted(3), Delta(0, "ab", [1, 2], ()), finished(0)]
    seam = Seam({})
    assert [seam.cut(event) for event in events] == events


def test_ends_that_were_received_are_left_out_each_for_its_candidate():
    seam = Seam({0: Received(1, 1, True), 1: Received(0, 0, False)})
    events = [Admitted(3), Delta(0, "a", [1], ()), finished(0), Delta(1, "b", [2], ()), finished(1)]
    rest = [event for event in map(seam.cut, events) if event is not None]
    assert rest == [Admitted(3), Delta(1, "b", [2], ()), finished(1)]


def test_log_probabilities_go_with_their_tokens():
    values = [TokenLogprobs(-float(i), ()) for i in range(3)]
    seam = Seam({0: Received(2, 0, False)})
    assert seam.cut(Delta(0, "", [7, 8, 9], values)) == Delta(0, "", [9], values[2:])


@pytest.mark.parametrize(("has", "text"), [(0, "héé"), (1, "éé"), (3, "é"), (5, "")])
def test_text_is_cut_by_its_bytes(has, text):
    cut = Seam({0: Received(0, has, False)}).cut(Delta(0, "héé", [1], ()))
    assert cut == Delta(0, text, [1], ())


@settings(deadline=None)
@given(
    pieces=st.lists(st.tuples(st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3)), max_size=12),
    data=st.data(),
)
def test_beginning_and_rest_are_the_whole_wherever_they_meet(pieces, data):
    """The client's deltas may be cut in other places than those of the new stream."""
    text = "".join(piece for piece, _ in pieces)
    tokens = [token for _, ids in pieces for token in ids]
    has_text = text[: data.draw(st.integers(0, len(text)))]
    has_tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
    seam = Seam({0: Received(len(has_tokens), len(has_text.encode()), False)})
    cuts = [seam.cut(Delta(0, piece, ids, ())) for piece, ids in pieces]
    rest = [cut for cut in cuts if isinstance(cut, Delta)]
    assert has_text + "".join(delta.text for delta in rest) == text
    assert [*has_tokens, *(token for delta in rest for token in delta.token_ids)] == tokens
