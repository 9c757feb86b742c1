"""Values of the journal: what its reader raises for what no scheduler has written."""

import json
import random

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.target import Target
from fuzz.targets.link_frames import END, SPEC

from scheduler_service.core.step import TokenLogprobs
from scheduler_service.journal_codec import (
    READING_ERRORS,
    Acceptance,
    decode_acceptance,
    decode_end,
    decode_logprobs,
    encode_acceptance,
    encode_end,
    encode_logprobs,
)
from scheduler_service.presentation import Presentation

ACCEPTANCE, PROMPT = encode_acceptance(Acceptance(SPEC, Presentation(stop=("x",)), "f", 5.0))
TEXTS = [ACCEPTANCE, encode_end(END), encode_logprobs(TokenLogprobs(-0.5, ((1, -0.5), (2, -1.5))))]


def make(rng: random.Random) -> bytes:
    """A value, whose kind is the first byte; a prompt is 20 bytes before the value."""
    kind = rng.randrange(len(TEXTS))
    text = TEXTS[kind].encode()
    if rng.random() < 0.7:
        text = json.dumps(mutate_json(rng, json.loads(text))).encode()
    if rng.random() < 0.3:
        text = mutate_bytes(rng, text)
    if rng.random() < 0.005:
        text = text[: rng.randrange(9)] + b"[" * 100_000
    prompt = mutate_bytes(rng, PROMPT) if rng.random() < 0.2 else PROMPT
    return bytes([kind, len(prompt) & 255]) + prompt + text


def read(data: bytes) -> None:
    """Reads it as the kind that it is of."""
    prompt, text = data[2 : 2 + data[1]], data[2 + data[1] :].decode()
    if data[0] == 0:
        acceptance = decode_acceptance(text, prompt)
        assert len(acceptance.spec.prompt_token_ids) == len(prompt) // 4
    elif data[0] == 1:
        assert decode_end("r", 3, text).index == 3
    else:
        assert isinstance(decode_logprobs(text).sampled, float)


TARGET = Target("journal_values", make, read, READING_ERRORS)
