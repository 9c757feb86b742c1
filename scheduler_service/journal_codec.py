"""Owns the values of the journal and their form on disk: JSON by field name, so that newer programs read it.

Reading raises one of READING_ERRORS for what no scheduler has written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.presentation import Presentation

READING_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_OWN_FIELDS = ("request_id", "model", "n", "priority", "tenant", "cache_salt", "adapter", "queue_timeout_s")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A request as it was accepted. `spec.deadline` is meaningless here, since clocks begin anew: see
    `deadline_at`."""

    spec: RequestSpec
    presentation: Presentation
    fingerprint: str  # of the model, so that no other weights go on with the output
    deadline_at: float | None  # seconds since 1970


@dataclass(frozen=True, slots=True)
class SavedCandidate:
    """What the journal has of one candidate."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]  # one for each token, if they were asked for
    end: Finished | None


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """A request that the journal has."""

    number: int
    acceptance: Acceptance
    candidates: tuple[SavedCandidate, ...]

    @property
    def request_id(self) -> str:
        """Its name."""
        return self.acceptance.spec.request_id

    @property
    def finished(self) -> bool:
        """Whether every candidate has ended."""
        return all(candidate.end is not None for candidate in self.candidates)

    def spec(self, now: float, sink: object) -> RequestSpec:
        """The request to run now, on the monotonic clock of `now`. One that was admitted before waits for as
        long as it takes."""
        given, deadline_at = self.acceptance.spec, self.acceptance.deadline_at
        begun = any(candidate.token_ids for candidate in self.candidates)
        return replace(
            given,
            deadline=None if deadline_at is None else now + deadline_at - time.time(),
            queue_timeout_s=None if begun else given.queue_timeout_s,
            sink=sink,
        )


def encode_acceptance(acceptance: Acceptance) -> tuple[str, bytes]:
    """All but the prompt as JSON, and the prompt as int32."""
    spec = acceptance.spec
    stopping = {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in asdict(spec.stopping).items()
    }
    values = {
        **{name: getattr(spec, name) for name in _OWN_FIELDS},
        "grammar": spec.grammar,
        "sampling": asdict(spec.sampling),
        "stopping": stopping,
        "presentation": asdict(acceptance.presentation),
        "fingerprint": acceptance.fingerprint,
        "deadline_at": acceptance.deadline_at,
    }
    return json.dumps(values), spec.prompt_token_ids.astype("<i4").tobytes()


def decode_acceptance(text: str, prompt: bytes) -> Acceptance:
    """The request."""
    values = json.loads(text)
    sampling, stopping, shown = values["sampling"], values["stopping"], values["presentation"]
    bias = tuple((int(token_id), float(value)) for token_id, value in sampling["logit_bias"])
    for name in ("eos_token_ids", "stop_token_ids"):
        stopping[name] = frozenset(stopping[name])
    spec = RequestSpec(
        **{name: values[name] for name in _OWN_FIELDS},
        grammar=values.get("grammar", ""),  # journals of earlier versions have none
        prompt_token_ids=np.frombuffer(prompt, "<i4").astype(np.int32),
        sampling=SamplingParams(**{**sampling, "logit_bias": bias}),
        stopping=StoppingParams(**stopping),
    )
    presentation = Presentation(**{**shown, "stop": tuple(shown["stop"])})
    return Acceptance(spec, presentation, values["fingerprint"], values["deadline_at"])


def encode_end(end: Finished) -> str:
    """A candidate's end."""
    values: dict[str, Any] = {
        "reason": end.reason.value,
        "stop_token_id": end.stop_token_id,
        "usage": asdict(end.usage),
        "timings": asdict(end.timings),
        "detail": end.detail,
    }
    return json.dumps(values)


def decode_end(request_id: str, index: int, text: str) -> Finished:
    """The end of candidate `index`."""
    values = json.loads(text)
    return Finished(
        request_id,
        index,
        FinishReason(values["reason"]),
        values["stop_token_id"],
        Usage(**values["usage"]),
        Timings(**values["timings"]),
        values["detail"],
    )


def encode_logprobs(logprobs: TokenLogprobs) -> str:
    """Those of one token."""
    return json.dumps([logprobs.sampled, logprobs.top])


def decode_logprobs(text: str) -> TokenLogprobs:
    """Those of one token."""
    sampled, top = json.loads(text)
    return TokenLogprobs(float(sampled), tuple((int(token_id), float(value)) for token_id, value in top))
