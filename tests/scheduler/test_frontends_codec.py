"""Bytes on the link between engine and frontends: all comes back as it was, and frames are found again."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from fake_engine import served_model
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.frontend_codec import (
    decode_finished,
    decode_models,
    decode_presentation,
    decode_refused,
    encode_finished,
    encode_models,
    encode_refused,
)
from scheduler_service.frontend_frames import INDEX_BITS, FromEngine, FromFrontend, ToEngine, ToFrontend
from scheduler_service.frontend_link import FrameReader, encode_frame
from scheduler_service.presentation import Presentation
from scheduler_service.validation import MAX_N

SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    seed=2**64 - 1,
    logit_bias=((3, -100.0), (7, 0.1)),
    logprobs=5,
)
STOPPING = StoppingParams(
    max_tokens=77, min_tokens=3, eos_token_ids=frozenset({2, 5}), stop_token_ids=frozenset({9})
)


def spec(prompt, **changes) -> RequestSpec:
    values = {
        "request_id": "a:b",
        "model": "mødel",
        "sampling": SAMPLING,
        "stopping": STOPPING,
        "n": 3,
        "priority": -2,
        "tenant": "t",
        "cache_salt": "säl\0t",
        "adapter": "a",
        "deadline": 123.4567890123,
        "queue_timeout_s": 0.1,
        "traceparent": "00-1-2-01",
    }
    return RequestSpec(prompt_token_ids=np.array(prompt, np.int32), **{**values, **changes})


def passed(frame):
    """What the other end reads of the parts of one frame."""
    (parts,) = FrameReader().feed(encode_frame(frame.encode()))
    return parts


def test_requests_come_back_as_they_were():
    sent = [
        spec([1, 2, 2**31 - 1]),
        spec([5] * 4000, deadline=None, queue_timeout_s=None, sampling=SamplingParams()),
        spec([9], stopping=StoppingParams(max_tokens=1)),
    ]
    frame = ToEngine()
    for number, each in enumerate(sent):
        frame.submit(number, each, Presentation(stop=("a", "b")))
    received = FromFrontend(passed(frame))
    sink = object()
    for number, (message, each) in enumerate(zip(received.messages, sent, strict=True)):
        assert message[:2] == ["submit", number]
        assert decode_presentation(message[2]) == Presentation(stop=("a", "b"))
        got = received.spec(message[3:], sink)
        assert got.prompt_token_ids.dtype == np.int32
        assert got.prompt_token_ids.tolist() == each.prompt_token_ids.tolist()
        for field in fields(RequestSpec):
            if field.name not in ("prompt_token_ids", "sink"):
                assert getattr(got, field.name) == getattr(each, field.name), field.name
        assert got.sink is sink


def test_the_sample_leaves_no_default_where_a_field_could_be_forgotten():
    sample = spec([1])
    for kind, value in ((SamplingParams, sample.sampling), (StoppingParams, sample.stopping)):
        default = kind() if kind is SamplingParams else kind(max_tokens=1)
        same = [
            field.name for field in fields(kind) if getattr(value, field.name) == getattr(default, field.name)
        ]
        assert same == []


def test_tokens_come_back_by_candidate_with_their_logprobs():
    frame = ToFrontend()
    number = 2**40  # as after a year
    for row, token_id in enumerate((7, 0, 999_999)):
        frame.candidates.append((number << INDEX_BITS) + row)
        frame.token_ids.append(token_id)
        if row == 1:
            frame.add_logprobs(TokenLogprobs(-0.5, ((4, -1.25), (5, -2.0))))
    frame.before.append(["accepted", number])
    frame.after.append(["finish"])
    received = FromEngine.decode(passed(frame))
    assert list(received.candidates) == [(number << INDEX_BITS) + row for row in range(3)]
    assert list(received.token_ids) == [7, 0, 999_999]
    assert received.logprobs == {1: TokenLogprobs(-0.5, ((4, -1.25), (5, -2.0)))}
    assert (received.before, received.after) == ([["accepted", number]], [["finish"]])


def test_all_candidates_of_a_request_have_a_name():
    assert MAX_N <= 1 << INDEX_BITS


def test_a_frame_with_nothing_in_it_is_read_as_such():
    received = FromEngine.decode(passed(ToFrontend()))
    assert (received.before, list(received.token_ids), received.after) == ([], [], [])


@pytest.mark.parametrize("reason", RefusalReason)
def test_refusals_come_back(reason):
    refused = Refused("r", reason, 1, 2, 3, 0.25)
    frame = ToFrontend()
    frame.before.append(encode_refused(refused))
    assert decode_refused(FromEngine.decode(passed(frame)).before[0]) == refused


@pytest.mark.parametrize("reason", FinishReason)
def test_ends_come_back(reason):
    end = Finished("r", 2, reason, 11, Usage(1, 2, 3, 4), Timings(0.1, 0.2, 0.3, 0.4, None), "a détail")
    frame = ToFrontend()
    frame.after.append(encode_finished(end))
    assert decode_finished("r", 2, FromEngine.decode(passed(frame)).after[0]) == end


def test_a_tokenizer_is_sent_only_when_it_is_new():
    def send(models, known):
        rows, files = encode_models(models, known)
        frame = ToFrontend()
        frame.before.append(rows)
        frame.files = files
        received = FromEngine.decode(passed(frame))
        assert dict(decode_models(received.before[0], received.files, known)) == models
        return len(received.files)

    one, two = served_model("one"), served_model("two", kind=None)
    assert send({"one": one}, {}) == len(one.tokenizer_json)
    more = {"one": replace(one, ready_workers=3), "two": two}
    assert send(more, {"one": one}) == 0
    other = replace(one, tokenizer_json=b"other")
    assert send({**more, "one": other}, more) == len(b"other")


@given(st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=6), st.integers())
def test_frames_are_found_however_they_are_cut(frames, seed):
    data = b"".join(encode_frame(parts) for parts in frames)
    rng = random.Random(seed)
    reader = FrameReader()
    found = []
    while data:
        cut = rng.randint(1, 30)
        found += [[bytes(part) for part in parts] for parts in reader.feed(data[:cut])]
        data = data[cut:]
    assert found == frames


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_wait_for_more(data):
    reader = FrameReader()
    try:
        for parts in reader.feed(data):
            FromEngine.decode(parts)
    except (ValueError, TypeError):  # what the link ends at
        pass
