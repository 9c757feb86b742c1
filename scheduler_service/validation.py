"""Owns the checks of GenerateRequest: every field, its range, and the numbers in the messages.

All that is wrong with a request is told at once. The ranges are those in inference.proto.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import Int32
from scheduler_service.errors import Violation, Violations, context_too_long, invalid_request, shown
from scheduler_service.output_form import OutputForm, check_output_form
from scheduler_service.prompt_validation import check_has_tokenizer, check_ids, check_prompt, find_or_unknown
from scheduler_service.served_model import ServedModel
from tidegate.inference.v1 import inference_pb2 as pb

MAX_N = 64
DEFAULT_TENANT = "default"
MAX_NAME_CHARACTERS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_QUEUE_TIMEOUT_S = 86_400
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of a float; `above` leaves the lower end out."""

    low: float
    high: float
    default: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.low:g} to {self.high:g}"


_SAMPLING_RANGES = {
    "temperature": _Range(0, 2, 1),
    "top_p": _Range(0, 1, 1, above=True),
    "min_p": _Range(0, 1, 0),
    "presence_penalty": _Range(-2, 2, 0),
    "frequency_penalty": _Range(-2, 2, 0),
    "repetition_penalty": _Range(0, 10, 1, above=True),
}
_BIAS_RANGE = _Range(-100, 100, 0)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a GenerateRequest asks for, checked, with every default resolved that needs no prompt."""

    model: ServedModel
    request_id: str  # empty: to be made
    prompt_token_ids: Int32 | None  # where the prompt was given as such
    sampling: SamplingParams
    n: int
    priority: int
    queue_timeout_s: float | None
    tenant: str
    cache_salt: str
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    text: bool
    token_ids: bool
    skip_special_tokens: bool
    form: OutputForm | None = None  # what the output must match

    def stopping(self, prompt_tokens: int, default_max_tokens: int) -> StoppingParams:
        """Limits for a prompt of that length. Raises ServiceError if it cannot fit the model's context."""
        room = self.model.max_model_len - prompt_tokens
        max_tokens = self.max_tokens if self.max_tokens is not None else min(room, default_max_tokens)
        if room < 1 or max_tokens > room:
            raise context_too_long(prompt_tokens, max(max_tokens, 1), self.model.max_model_len)
        if self.min_tokens > max_tokens:
            text = (
                f"min_tokens is {self.min_tokens}; allowed: 0 to {max_tokens}, the default of max_tokens here"
            )
            raise invalid_request([Violation("stopping.min_tokens", text)])
        return StoppingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            eos_token_ids=frozenset() if self.ignore_eos else self.model.eos_token_ids,
            stop_token_ids=self.stop_token_ids,
        )


def check_generate(request: pb.GenerateRequest, models: Mapping[str, ServedModel]) -> GenerateOptions:
    """Checks every field. Raises ServiceError with all that is wrong."""
    model, lookup_error = find_or_unknown(request.model, models)
    wrong = Violations()
    _check_identity(request, wrong)
    n = _value(request, "n", 1)
    if not 1 <= n <= MAX_N:
        wrong.note("n", f"n is {n}; allowed: 1 to {MAX_N}")
    queue_timeout_s = _check_queue_timeout(request, wrong)
    text = _check_output(request.output, model, wrong)
    _check_stopping(request.stopping, model.vocab_size, text, wrong)
    sampling = _check_sampling(request.sampling, model.vocab_size, wrong)
    form = check_output_form(request, model, wrong)
    prompt_token_ids = check_prompt(request, model, wrong)
    wrong.raise_any()
    if lookup_error is not None:
        raise lookup_error
    return GenerateOptions(
        model=model,
        request_id=request.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(**sampling, logprobs=_value(request.output, "logprobs", None)),
        n=n,
        priority=_value(request, "priority", 0),
        queue_timeout_s=queue_timeout_s,
        tenant=request.tenant or DEFAULT_TENANT,
        cache_salt=request.cache_salt,
        max_tokens=_value(request.stopping, "max_tokens", None),
        min_tokens=_value(request.stopping, "min_tokens", 0),
        stop=tuple(request.stopping.stop),
        stop_token_ids=frozenset(request.stopping.stop_token_ids),
        ignore_eos=_value(request.stopping, "ignore_eos", False),
        text=text,
        token_ids=_value(request.output, "token_ids", True),
        skip_special_tokens=_value(request.output, "skip_special_tokens", True),
        form=form,
    )


def _value(message: Any, field: str, default: Any) -> Any:
    """The value of an `optional` field, or `default` where it is unset."""
    return getattr(message, field) if message.HasField(field) else default


def _check_identity(request: pb.GenerateRequest, wrong: Violations) -> None:
    request_id = request.request_id
    allowed = f"allowed: at most {MAX_NAME_CHARACTERS} characters of [A-Za-z0-9._:-]"
    if request_id and (len(request_id) > MAX_NAME_CHARACTERS or not _REQUEST_ID.fullmatch(request_id)):
        wrong.note("request_id", f"request_id is {shown(request_id)}; {allowed}")
    for field in ("tenant", "cache_salt"):
        length = len(getattr(request, field))
        if length > MAX_NAME_CHARACTERS:
            wrong.note(field, f"{length} characters; allowed: at most {MAX_NAME_CHARACTERS}")
    if request.adapter:
        wrong.note("adapter", f"adapter is {shown(request.adapter)}; this server has none, leave it empty")


def _check_queue_timeout(request: pb.GenerateRequest, wrong: Violations) -> float | None:
    if not request.HasField("queue_timeout"):
        return None
    timeout_s = request.queue_timeout.seconds + request.queue_timeout.nanos / 1e9
    if not 0 < timeout_s <= MAX_QUEUE_TIMEOUT_S:
        allowed = f"allowed: above 0 to {MAX_QUEUE_TIMEOUT_S} s"
        wrong.note("queue_timeout", f"queue_timeout is {timeout_s:g} s; {allowed}")
    return timeout_s


def _check_output(output: pb.OutputParams, model: ServedModel, wrong: Violations) -> bool:
    """Whether text is to be sent. Models without a tokenizer send none unless asked to, which is refused."""
    logprobs = _value(output, "logprobs", 0)
    if logprobs > MAX_LOGPROBS:
        wrong.note("output.logprobs", f"logprobs is {logprobs}; allowed: 0 to {MAX_LOGPROBS}")
    text = bool(_value(output, "text", bool(model.tokenizer_json)))
    if text:
        check_has_tokenizer(model, "output.text", wrong)
    return text


def _check_stopping(stopping: pb.StoppingParams, vocab_size: int, text: bool, wrong: Violations) -> None:
    max_tokens = _value(stopping, "max_tokens", None)
    if max_tokens == 0:
        wrong.note("stopping.max_tokens", "max_tokens is 0; allowed: at least 1")
    elif max_tokens is not None and stopping.min_tokens > max_tokens:
        wrong.note("stopping.min_tokens", f"min_tokens is {stopping.min_tokens}; allowed: 0 to {max_tokens}")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        wrong.note("stopping.stop", f"{len(stopping.stop)} strings; allowed: at most {MAX_STOP_STRINGS}")
    else:
        for i, stop in enumerate(stopping.stop):
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                allowed = f"allowed: 1 to {MAX_STOP_CHARACTERS}"
                wrong.note(f"stopping.stop[{i}]", f"{len(stop)} characters; {allowed}")
    if stopping.stop and not text:
        wrong.note(
            "stopping.stop", "stop strings are found in text, and output.text is false; use stop_token_ids"
        )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        count = len(stopping.stop_token_ids)
        wrong.note("stopping.stop_token_ids", f"{count} ids; allowed: at most {MAX_STOP_TOKEN_IDS}")
    else:
        check_ids(stopping.stop_token_ids, vocab_size, "stopping.stop_token_ids", wrong)


def _check_sampling(params: pb.SamplingParams, vocab_size: int, wrong: Violations) -> dict[str, Any]:
    """Values by name, defaults filled in, for the core's SamplingParams."""
    values: dict[str, Any] = {}
    for name, allowed in _SAMPLING_RANGES.items():
        value = _value(params, name, allowed.default)
        if value not in allowed:
            wrong.note(f"sampling.{name}", f"{name} is {value:g}; allowed: {allowed}")
        values[name] = value
    top_k = _value(params, "top_k", 0)
    values["top_k"] = top_k if top_k < vocab_size else 0  # all of them
    values["seed"] = _value(params, "seed", None)
    if values["seed"] is None:
        values["seed"] = secrets.randbits(64)
    values["logit_bias"] = _check_logit_bias(params.logit_bias, vocab_size, wrong)
    return values


def _check_logit_bias(
    logit_bias: Mapping[int, float], vocab_size: int, wrong: Violations
) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(logit_bias) > MAX_LOGIT_BIAS:
        wrong.note(field, f"{len(logit_bias)} entries; allowed: at most {MAX_LOGIT_BIAS}")
        return ()
    for token_id, bias in logit_bias.items():
        if token_id >= vocab_size:
            wrong.note(f"{field}[{token_id}]", f"id is {token_id}; allowed: 0 to {vocab_size - 1}")
        if bias not in _BIAS_RANGE:
            wrong.note(f"{field}[{token_id}]", f"bias is {bias:g}; allowed: {_BIAS_RANGE}")
    return tuple(sorted(logit_bias.items()))
