"""Frames between the engine and frontends, and the values in them."""

import random
from dataclasses import replace

import numpy as np
from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.target import Target

from scheduler_service import errors
from scheduler_service.core.admission import DrainRate, QueueLoad, RefusalReason, Refused
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.frontend_codec import (
    decode_error,
    decode_finished,
    decode_models,
    decode_origin,
    decode_presentation,
    decode_refused,
    encode_error,
    encode_finished,
    encode_models,
    encode_origin,
    encode_refused,
)
from scheduler_service.frontend_frames import FromEngine, FromFrontend, ToEngine, ToFrontend
from scheduler_service.frontend_link import FrameReader, encode_frame
from scheduler_service.held_output import Origin
from scheduler_service.presentation import Presentation
from scheduler_service.served_model import ServedModel

SPEC = RequestSpec(
    request_id="r",
    model="m",
    prompt_token_ids=np.arange(5, dtype=np.int32),
    sampling=SamplingParams(logit_bias=((3, 1.0),)),
    stopping=StoppingParams(max_tokens=4, eos_token_ids=frozenset({1})),
)
MODEL = ServedModel("m", "f", 128, 500, frozenset({1}), b"{}", "?", {"bos_token": "<s>"})
REFUSED = Refused("r", RefusalReason.QUEUE_FULL_REQUESTS, 1, 4, 4, 0.5)
END = Finished("r", 0, FinishReason.LENGTH, None, Usage(1, 2, 3, 4), Timings(1.0, 2.0, 3.0, 4.0, 5.0), "")


def _to_engine(rng: random.Random) -> list[bytes]:
    frame = ToEngine()
    for number in range(rng.randint(1, 3)):
        frame.submit(number, SPEC, Presentation(stop=("x",)))
    frame.messages.append(["abandon", 1])
    if rng.random() < 0.6:
        frame.messages = mutate_json(rng, frame.messages) or []
    return list(frame.encode())


def _to_frontend(rng: random.Random) -> list[bytes]:
    frame = ToFrontend()
    rows, frame.files = encode_models({"m": MODEL}, {})
    frame.before += [["refused", 1, *encode_refused(REFUSED)], ["status", False, True, rows]]
    frame.before.append(["attached", 2, *encode_origin(Origin("r", "m", 1, 5, None, Presentation()))])
    frame.before.append(["not_attached", 3, *encode_error(errors.request_not_found("r"))])
    frame.queue = QueueLoad(1, 2), DrainRate(0.5, 1.0)
    for token in range(3):
        frame.candidates.append(64 + token)
        frame.token_ids.append(token)
        frame.add_logprobs(TokenLogprobs(-0.5, ((token, -0.5),)))
    frame.after.append(["finished", 1, 0, *encode_finished(END)])
    if rng.random() < 0.6:
        frame.before = mutate_json(rng, frame.before) or []
        frame.after = mutate_json(rng, frame.after) or []
    return list(frame.encode())


def make(rng: random.Random) -> bytes:
    """One or two frames of one of the two directions, named by the first byte."""
    direction = rng.randrange(2)
    maker = (_to_engine, _to_frontend)[direction]
    frames = b""
    for _ in range(rng.randint(1, 2)):
        parts = maker(rng)
        if rng.random() < 0.4:
            at = rng.randrange(len(parts))
            parts[at] = mutate_bytes(rng, bytes(parts[at]))
        frames += encode_frame(parts)
    if rng.random() < 0.3:
        frames = mutate_bytes(rng, frames)
    return bytes([direction]) + frames


def read(data: bytes) -> None:
    """Reads frames as they come, in pieces. What is wrong ends a link, whichever of these errors it is."""
    reader = FrameReader()
    for start in range(1, len(data), 100):
        for parts in reader.feed(data[start : start + 100]):
            if data[0]:
                _read_from_engine(FromEngine.decode(parts))
            else:
                _read_from_frontend(FromFrontend(parts))


def _read_from_engine(frame: FromEngine) -> None:
    for message in (*frame.before, *frame.after):
        match message:
            case ["refused", _, *values]:
                assert replace(decode_refused(values), request_id="r").request_id == "r"
            case ["attached", _, *values]:
                assert isinstance(decode_origin(values).presentation, Presentation)
            case ["not_attached", _, *values]:
                assert decode_error(values).code
            case ["finished", _, index, *values]:
                decode_finished("r", index, values)
            case ["status", _, _, rows]:
                dict(decode_models(rows, frame.files, {}))


def _read_from_frontend(frame: FromFrontend) -> None:
    for message in frame.messages:
        match message:
            case ["submit", _, shown, *values]:
                frame.spec(values, None)
                assert isinstance(decode_presentation(shown).stop, tuple)


TARGET = Target("link_frames", make, read, (ValueError, TypeError, KeyError, AttributeError))
