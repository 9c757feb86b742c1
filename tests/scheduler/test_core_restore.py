"""Requests that an earlier scheduler had go on with the tokens that they had, and end as they would have."""

from __future__ import annotations

import pytest
from core_harness import Harness, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.admission import Accepted, RefusalReason, Refused
from scheduler_service.core.events import FinishReason


def restore(
    h: Harness, request_id: str, had: list[int | None], prompt: int = 10, max_tokens: int = 8, **options
):
    """`had` are numbers of tokens that candidates had; None: it had ended."""
    spec = h.spec(request_id, prompt, max_tokens, n=len(had), **options)
    whole = [expected_outputs(spec, index)[0] for index in range(spec.n)]
    outputs = [None if count is None else whole[index][:count] for index, count in enumerate(had)]
    answer = h.checked(h.core.restore(spec, outputs, h.now))
    if isinstance(answer, Accepted):
        h.specs[request_id] = spec
        for index, count in enumerate(had):
            h.seen[request_id, index].tokens += whole[index][: count or 0]
    return answer


def test_it_is_admitted_with_all_known_tokens_and_gets_the_rest():
    h = Harness()
    restore(h, "a", [5])
    (admission,) = h.step().admitted
    assert (admission.num_prompt_tokens, len(admission.token_ids), admission.num_computed_tokens) == (
        10,
        15,
        0,
    )
    h.run()
    assert h.assert_right("a").usage.output_tokens == 8
    assert h.seen["a", 0].kinds[0] == "Admitted"
    h.assert_empty()


@settings(deadline=None)
@given(
    requests=st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 7)), min_size=1, max_size=4).filter(
            lambda had: any(count is not None for count in had)
        ),
        min_size=1,
        max_size=5,
    ),
    depth=st.integers(1, 3),
    num_blocks=st.integers(7, 40),
)
def test_whatever_they_had_they_end_with_the_same_tokens(requests, depth, num_blocks):
    h = Harness(depth=depth, num_blocks=num_blocks)
    for number, had in enumerate(requests):
        assert isinstance(restore(h, f"r{number}", had), Accepted)
    h.accept("new", 10, 8, n=2)
    h.run()
    h.assert_right("new", 0)
    for number, had in enumerate(requests):
        for index, count in enumerate(had):
            if count is None:
                assert h.seen[f"r{number}", index].events == []
            else:
                h.assert_right(f"r{number}", index)
    h.assert_empty()


def test_the_door_is_open_for_it_when_it_is_closed_for_others():
    h = Harness(max_num_queued_reqs=0)
    h.core.start_draining()
    assert isinstance(restore(h, "a", [3]), Accepted)
    h.run()
    h.assert_right("a")


def test_times_count_from_the_restore_and_the_first_token_is_not_told():
    h = Harness()
    h.now = 10.0
    restore(h, "a", [5, 0])
    (told, _) = h.core.explain("a", h.now)
    assert (told.timeline[0].at_s, told.timeline[0].what) == (0.0, "restored")
    assert told.timeline[0].detail == "from the journal with 5 tokens; times count from here"
    h.now = 12.0
    h.plan()
    h.now = 13.0
    h.answer()
    h.run()
    end, other = h.assert_right("a", 0), h.assert_right("a", 1)
    assert end.timings.time_to_first_token_s is None
    assert (end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) == (2.0, 0.0, 1.0)
    # The other one had none, so that its first token comes now.
    assert other.timings.time_to_first_token_s == 3.0
    (told, _) = h.core.explain("a", h.now)
    assert [moment.what for moment in told.timeline] == ["restored", "admitted", "finished"]
    assert h.core.take_first_tokens() == [3.0]


def test_a_deadline_ends_it_as_any_other():
    h = Harness()
    restore(h, "a", [3], deadline=5.0)
    h.now = 6.0
    (end,) = h.note(h.core.expire(h.now))
    assert (end.reason, end.usage.output_tokens) == (FinishReason.DEADLINE, 3)
    h.assert_empty()


def test_what_cannot_be_taken_in_changes_nothing():
    h = Harness()
    restore(h, "a", [3])
    assert restore(h, "a", [3]) == Refused("a", RefusalReason.DUPLICATE_ID)
    assert restore(h, "b", [3], model="other") == Refused("b", RefusalReason.UNKNOWN_MODEL)
    assert restore(h, "c", [3], max_tokens=5000).reason is RefusalReason.CONTEXT_TOO_LONG
    with pytest.raises(ValueError, match="max_tokens"):
        restore(h, "d", [8])
    with pytest.raises(ValueError, match="n is 1"):
        h.core.restore(h.spec("e", 10), [[], []], h.now)
    h.run()
    h.assert_right("a")
    h.assert_empty()
