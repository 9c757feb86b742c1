"""Each token of a row with a grammar is allowed by it, whatever logits and batch; others notice nothing."""

import json

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
import torch
from byte_tokenizer import END, FIRST_BYTE, VOCAB_SIZE, tokenizer_json

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service import grammars
from worker_service.errors import UnsupportedModelError
from worker_service.grammars import Grammars, TokenMasks, read_vocabulary, unpack_forbidden
from worker_service.plan import Admission, Limits, Result, Sampling, Timings
from worker_service.plan_codec import decode_plan, encode_result
from worker_service.sampler import Sampler

CPU = torch.device("cpu")
VOCABULARY = read_vocabulary(tokenizer_json(), VOCAB_SIZE, (END,))
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 3},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
AB = llguidance.LLMatcher.grammar_from_regex("(ab){3}")
PLAIN = ""


def admission(slot: int, grammar: str, outputs=(), **sampling) -> Admission:
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=np.array([7, 8, *outputs], np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=np.empty(0, np.int32),
        sampling=Sampling(**sampling),
        grammar=grammar,
    )


class Rows:
    """Slots that sample from random logits, step after step."""

    def __init__(self, *admissions: Admission, vocabulary=VOCABULARY) -> None:
        self.grammars = Grammars(vocabulary, VOCAB_SIZE, CPU)
        self.sampler = Sampler(8, VOCAB_SIZE, CPU)
        self.outputs: dict[int, list[int]] = {}
        self.generator = torch.Generator().manual_seed(3)
        self.lost: list[int] = []
        for request in admissions:
            self.admit(request)

    def admit(self, request: Admission) -> None:
        self.grammars.admit(request)
        self.sampler.admit(request)
        self.outputs[request.slot] = request.token_ids[2:].tolist()

    def step(self, *slots: int, logits: torch.Tensor | None = None) -> None:
        columns = np.array(slots, np.int32)
        if logits is None:
            logits = torch.randn((len(slots), VOCAB_SIZE), generator=self.generator) * 3
        pending = self.grammars.start_masks(columns)
        masks = None if pending is None else pending.result()
        num_outputs = np.array([len(self.outputs[slot]) for slot in slots], np.int64)
        sampled = self.sampler.sample(logits, columns, num_outputs + 2, num_outputs, masks)
        if masks is not None:
            self.grammars.note_sampled(columns, masks.rows, sampled.token_ids)
            self.lost += [slots[row] for row in masks.lost]
        for slot, token in zip(slots, sampled.token_ids.tolist(), strict=True):
            self.outputs[slot].append(token)

    def run(self, *slots: int, steps: int = 60) -> None:
        """Until each has ended, as the scheduler would."""
        for _ in range(steps):
            slots = tuple(slot for slot in slots if END not in self.outputs[slot])
            if slots:
                self.step(*slots)

    def text(self, slot: int) -> str:
        tokens = self.outputs[slot]
        return VOCABULARY.decode_bytes(tokens[: tokens.index(END)]).decode()


def test_every_row_keeps_to_its_grammar_until_its_end():
    rows = Rows(
        admission(0, JSON),
        admission(1, JSON, temperature=1.0, seed=1, top_k=3),
        admission(2, JSON, temperature=1.5, seed=2, top_p=0.5, min_p=0.1),
        admission(3, AB, repetition_penalty=1.5, presence_penalty=2.0),
        admission(
            4,
            AB,
            temperature=1.0,
            bias_token_ids=np.array([END], np.int32),
            bias_values=np.array([100], np.float32),
        ),
    )
    rows.run(0, 1, 2, 3, 4)
    for slot in (0, 1, 2):
        jsonschema.validate(json.loads(rows.text(slot)), SCHEMA)
    assert rows.text(3) == rows.text(4) == "ababab"
    assert rows.lost == []


def test_a_row_without_a_grammar_notices_nothing():
    logits = torch.randn((3, VOCAB_SIZE), generator=torch.Generator().manual_seed(1))
    alone, mixed = Rows(admission(1, PLAIN)), Rows(admission(0, AB), admission(1, PLAIN), admission(2, AB))
    alone.step(1, logits=logits[1:2].clone())
    mixed.step(0, 1, 2, logits=logits.clone())
    assert mixed.outputs[1] == alone.outputs[1]
    assert alone.grammars.start_masks(np.array([1], np.int32)) is None
    mixed.grammars.release(np.array([0, 2], np.int32))
    assert mixed.grammars.start_masks(np.array([0, 1, 2], np.int32)) is None


def test_ids_without_text_are_never_allowed():
    rows = Rows(admission(0, llguidance.LLMatcher.grammar_from_regex("(?s:.){4}")))
    logits = torch.zeros((1, VOCAB_SIZE))
    logits[:, FIRST_BYTE + 256 :] = 50.0  # wider than the tokenizer
    logits[:, [0, 1]] = 60.0  # special tokens
    rows.step(0, logits=logits)
    assert FIRST_BYTE <= rows.outputs[0][0] < FIRST_BYTE + 256


def test_a_resumed_request_goes_on_where_its_outputs_end():
    whole = Rows(admission(0, JSON, temperature=1.0, seed=9))
    whole.run(0)
    begun = whole.outputs[0][:5]
    moved = Rows(admission(3, AB), admission(5, JSON, begun, temperature=1.0, seed=9))
    moved.run(3, 5)
    jsonschema.validate(json.loads(moved.text(5)), SCHEMA)
    assert moved.outputs[5][:5] == begun


def test_a_slot_that_is_given_out_again_begins_anew():
    rows = Rows(admission(0, AB))
    for _ in range(3):
        rows.step(0)
    rows.grammars.release(np.array([0], np.int32))
    rows.admit(admission(0, AB, temperature=1.0))
    rows.run(0)
    assert rows.text(0) == "ababab"


def test_steps_in_which_others_sample_lose_nothing():
    rows = Rows(admission(0, AB), admission(1, AB), admission(2, PLAIN))
    for slots in ((0,), (2,), (1, 2), (2,), (0, 1), (0,), (1,)):
        rows.step(*slots)
    rows.run(0, 1)
    assert rows.text(0) == rows.text(1) == "ababab"


def test_min_tokens_waits_where_the_grammar_may_go_on_and_yields_where_not():
    open_end = llguidance.LLMatcher.grammar_from_regex("a+")
    banned = {"min_tokens": 9, "banned_token_ids": np.array([END], np.int32)}
    rows = Rows(
        admission(0, open_end, **banned),
        admission(1, AB, **banned),
        admission(2, AB, temperature=1.0, **banned),
    )
    logits = torch.zeros((3, VOCAB_SIZE))
    logits[:, END] = 30.0
    for _ in range(10):
        rows.step(0, 1, 2, logits=logits.clone())
    assert rows.outputs[0].index(END) == 9
    assert rows.outputs[1].index(END) == rows.outputs[2].index(END) == 6


def test_log_probabilities_are_those_without_the_grammar():
    rows, logits = Rows(admission(0, AB, logprobs=1)), torch.zeros((1, VOCAB_SIZE))
    logits[0, 40] = 5.0
    pending = rows.grammars.start_masks(np.array([0], np.int32))
    sampled = rows.sampler.sample(
        logits.clone(), np.array([0], np.int32), np.array([2]), np.array([0]), pending.result()
    )
    columns, expected = sampled.logprobs.to_columns(), logits.log_softmax(-1)[0]
    assert VOCABULARY.decode_bytes(sampled.token_ids.tolist()) == b"a"
    assert columns.sampled[0] == pytest.approx(float(expected[int(sampled.token_ids[0])]))
    assert columns.top_token_ids.tolist() == [40]


def test_a_grammar_that_can_not_be_followed_loses_its_row_alone():
    bad = llguidance.LLMatcher.grammar_from_regex("([")  # the scheduler refuses such
    rows = Rows(admission(0, AB), admission(1, bad), admission(2, AB))
    for _ in range(3):
        rows.step(0, 1, 2)
    assert rows.lost == [1, 1, 1]
    assert VOCABULARY.decode_bytes(rows.outputs[0]) == b"aba"


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)
    made = []
    build = Grammars._new_matcher
    monkeypatch.setattr(Grammars, "_new_matcher", lambda self, text: made.append(text) or build(self, text))
    rows = Rows(*(admission(slot, AB) for slot in range(5)))
    rows.grammars.prepare(admission(6, AB))
    rows.step(0, 1, 2, 3, 4)
    assert made == [AB]
    texts = [llguidance.LLMatcher.grammar_from_regex(f"x{i}") for i in range(4)]
    for text in texts:
        rows.admit(admission(6, text))
        rows.step(6)
    assert made == [AB, *texts]
    rows.admit(admission(6, AB))
    rows.step(6)
    assert made == [AB, *texts, AB]


def test_what_no_grammar_can_be_held_to():
    assert read_vocabulary(b"", VOCAB_SIZE, (END,)) is None
    assert read_vocabulary(tokenizer_json(), VOCAB_SIZE, ()) is None
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    assert read_vocabulary(words.to_str().encode(), VOCAB_SIZE, (END,)) is None
    assert read_vocabulary(tokenizer_json(), 200, (END,)).vocab_size == FIRST_BYTE + 256


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"version": "1.0", "mod', b"\xff\xfe\x00"])
def test_what_is_no_tokenizer_is_refused(content):
    with pytest.raises(
        UnsupportedModelError, match=rf"tokenizer\.json \({len(content)} bytes\) can't be read"
    ):
        read_vocabulary(content, VOCAB_SIZE, (END,))


def test_the_codec_carries_grammars_and_lost_ones():
    limits = Limits(8, 10, 16, 64, 64, VOCAB_SIZE)
    tokens = np.array([7, 8], "<i4").tobytes()
    wire = pb.AdmittedRequest(slot=1, token_ids=tokens, num_prompt_tokens=2, grammar=AB)
    wire.sampling.top_p = wire.sampling.repetition_penalty = 1.0
    assert decode_plan(pb.StepPlan(seq=1, admitted=[wire]), limits).admitted[0].grammar == AB
    column = np.array([0, 2], np.int32)
    result = Result(1, column, column, column, None, Timings(0, 0, 0, 0, 0, 0), np.array([2], np.int32))
    assert encode_result(result).grammar_failed_rows == np.array([2], "<i4").tobytes()


@pytest.mark.parametrize("width", [1, 31, 32, 33, VOCAB_SIZE, 3 * 32 * 7])
def test_masks_forbid_the_same_on_every_device(width: int) -> None:
    random = np.random.default_rng(width)
    words = -(-width // 32)
    packed = random.integers(-(2**31), 2**31, (5, words), dtype=np.int64).astype(np.int32)
    packed[1], packed[2], packed[3, ::2] = 0, -1, 0
    rows, none = np.array([0, 2, 3, 5, 6], np.int32), np.empty(0, np.int32)
    before = torch.randn((8, width), generator=torch.Generator().manual_seed(width))
    by_bits, by_bytes = before.clone(), before.clone()
    TokenMasks(rows, packed, None, none).apply(by_bits, -5.0)
    TokenMasks(rows, packed, unpack_forbidden(packed, width, CPU), none).apply(by_bytes, -5.0)
    assert torch.equal(by_bits, by_bytes)
    for place, row in enumerate(rows):
        for token in range(width):
            is_allowed = packed[place, token // 32] >> (token % 32) & 1
            assert by_bits[row, token] == (before[row, token] if is_allowed else -5.0)
    untouched = [1, 4, 7]
    assert torch.equal(by_bits[untouched], before[untouched])


def test_masks_of_fewer_tokens_than_logits_are_refused() -> None:
    none = np.empty(0, np.int32)
    masks = TokenMasks(np.zeros(1, np.int32), np.zeros((1, 2), np.int32), None, none)
    with pytest.raises(ValueError, match="2 words can't have a bit for each of 65 tokens"):
        masks.apply(torch.zeros((1, 65)), 0.0)
