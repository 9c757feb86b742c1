"""Owns the grammars of the requests on board: compiled once, followed token by token, and a step's masks.

Compiling, following and masking happen on threads, the masks while the forward runs. A state belongs to a
stay in a slot and begins with the outputs that the request brought along. llguidance does the work; see
docs/structured-output.md.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.cpu_sampling import forbid_rows
from worker_service.plan import Admission, Int32
from worker_service.tokenizer_files import check_tokenizer

MAX_CACHED = 256  # compiled grammars that are kept for requests to come
MAX_LEXER_STATES = 50_000  # of each, made as outputs need them; 1 to 2 KB a state
_MAX_MASK_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """What a step's sampling may not choose: for M of its rows."""

    rows: Int32  # [M] indices into the rows that sample, ascending
    allowed: Int32  # [M, W] a bit for each token, from the lowest on; all of a lost row's
    forbidden: Tensor | None  # [M, V] bool on the device, what isn't allowed; None: the device is the CPU
    lost: Int32  # those of rows whose grammar can't be followed any more

    def apply(self, logits: Tensor, value: float) -> None:
        """Gives what is forbidden in logits `[S, V]` fp32, on the device, this value."""
        if self.forbidden is None:
            forbid_rows(logits, self.rows.astype(np.int64), self.allowed, np.float32(value))
        else:
            at = torch.from_numpy(self.rows.astype(np.int64)).to(logits.device)
            logits[at] = logits[at].masked_fill(self.forbidden, value)


class _State:
    """One stay's way through its grammar. After its making only the mask thread touches it."""

    __slots__ = ("_compiled", "_outputs", "matcher")

    def __init__(self, compiled: Future[llguidance.LLMatcher], outputs: list[int]) -> None:
        self._compiled = compiled
        self._outputs = outputs
        self.matcher: llguidance.LLMatcher | None = None

    def open(self) -> llguidance.LLMatcher:
        """The matcher behind the outputs so far. Waits for the grammar to be compiled, the first time."""
        if self.matcher is None:
            self.matcher = self._compiled.result().deep_copy()
            self.matcher.consume_tokens(self._outputs)
        return self.matcher


@dataclass(frozen=True, slots=True, eq=False)
class _SampledTokens:
    """Tokens on their way from the device, and the states that they belong to."""

    states: list[_State]
    token_ids: Tensor  # [len(states)] int64 on the host
    arrived: torch.cuda.Event | None


def read_vocabulary(
    tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> llguidance.LLTokenizer | None:
    """What grammars need to know of the tokens: takes about a second. None: outputs can't be held to any.

    Logits may be wider than the tokenizer; the ids beyond it have no text and are never allowed. Raises
    UnsupportedModelError for what is no tokenizer at all.
    """
    if not tokenizer_json or not eos_token_ids:
        return None
    ends = list(eos_token_ids)
    try:
        text = tokenizer_json.decode()
        try:
            return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except ValueError:  # the tokenizer may also have more ids than the logits
            return llguidance.LLTokenizer(text, eos_token=ends)
    except ValueError:
        check_tokenizer(tokenizer_json)
        return None


class Grammars:
    """The grammars of an executor's slots. Its methods are for the step thread, but for `prepare`."""

    def __init__(
        self, vocabulary: llguidance.LLTokenizer | None, vocab_size: int, device: torch.device
    ) -> None:
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _State] = {}  # by slot
        self._sampled: _SampledTokens | None = None  # that no state has followed yet
        self._compiled: OrderedDict[bytes, Future[llguidance.LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()  # of _compiled
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masker = ThreadPoolExecutor(1, "grammar-masks")
        threads = max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) // 2))
        self._parallel = llguidance.LLExecutor(threads) if vocabulary is not None else None

    def prepare(self, request: Admission) -> None:
        """Begins to compile the grammar of a request that will be admitted. For any thread."""
        if request.grammar and self.vocabulary is not None:
            self._compile(request.grammar)

    def admit(self, request: Admission) -> None:
        """Starts the state of a request, if it has a grammar."""
        self._states.pop(request.slot, None)
        if request.grammar:
            outputs = request.token_ids[request.num_prompt_tokens :].tolist()
            self._states[request.slot] = _State(self._compile(request.grammar), outputs)

    def release(self, slots: Int32) -> None:
        """Ends the state of slots that have some."""
        if self._states:
            for slot in slots.tolist():
                self._states.pop(slot, None)

    def clear(self) -> None:
        """Ends all state; what is compiled is kept."""
        self._states.clear()
        self._sampled = None

    def start_masks(self, slots: Int32) -> Future[TokenMasks] | None:
        """Begins the masks for the slots that will sample; None where none of them has a grammar."""
        if not self._states:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._states]
        if not rows:
            return None
        states = [self._states[slot] for slot in slots[rows].tolist()]
        sampled, self._sampled = self._sampled, None
        return self._masker.submit(self._masks, np.array(rows, np.int32), states, sampled)

    def note_sampled(self, slots: Int32, rows: Int32, token_ids: Tensor) -> None:
        """Takes the tokens (`[S]` int64 on the device) that a step sampled; `rows` are its masks' rows.

        Their copy to the host is queued before the next step's forward, so that nobody waits for that.
        """
        states = [self._states[slot] for slot in slots[rows].tolist()]
        chosen = token_ids[torch.from_numpy(rows).long().to(self._device)]
        arrived = None
        if self._device.type == "cuda":
            on_host = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
            chosen = on_host.copy_(chosen, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._sampled = _SampledTokens(states, chosen, arrived)

    def _compile(self, grammar: str) -> Future[llguidance.LLMatcher]:
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._compiler.submit(self._new_matcher, grammar)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(key)
            return compiled

    def _new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Never raises for a bad grammar: then the matcher is in error, and its rows are lost."""
        if self.vocabulary is None:
            raise ValueError("the plan has a grammar, and this worker's hello said that it follows none")
        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        return llguidance.LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits)

    def _masks(self, rows: Int32, states: list[_State], sampled: _SampledTokens | None) -> TokenMasks:
        """Runs on the mask thread, which keeps the order of steps."""
        if sampled is not None:
            _follow(sampled)
        assert self.vocabulary is not None and self._parallel is not None  # noqa: S101 - states have opened
        matchers = [state.open() for state in states]
        words = -(-self.vocabulary.vocab_size // 32)
        packed = np.zeros((len(rows), words), np.int32)  # a bit for each token: allowed
        numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
        llguidance.numpy.fill_next_token_bitmask_par(self._parallel, numbered, packed)
        lost = np.array([matcher.is_error() for matcher in matchers], np.bool_)
        packed[lost] = -1
        on_cpu = self._device.type == "cpu"
        forbidden = None if on_cpu else unpack_forbidden(packed, self._vocab_size, self._device)
        return TokenMasks(rows, packed, forbidden, rows[lost])


def unpack_forbidden(packed: Int32, width: int, device: torch.device) -> Tensor:
    """`[M, width]` bool on the device: the bits of `packed` `[M, W]` that are not set."""
    on_host = torch.from_numpy(packed)
    on_device = on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((on_device.unsqueeze(-1) >> shifts & 1) == 0).flatten(1)[:, :width]


def _follow(sampled: _SampledTokens) -> None:
    if sampled.arrived is not None:
        sampled.arrived.synchronize()
    for state, token_id in zip(sampled.states, sampled.token_ids.tolist(), strict=True):
        matcher = state.open()
        if not matcher.is_stopped():
            matcher.consume_token(token_id)
