"""What the client hands out: plain values, made from the protocol's messages.

Owns their shape and how they are read from messages. Knows nothing of channels or calls.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from tidegate.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """Who speaks, such as "system", "user" or "assistant"."""
    content: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match."""

    text: str
    syntax: str = "lark"
    """"lark" (its root is the rule `start`), or "ebnf" (GBNF, whose root is the rule `root`)."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request was taken from the queue and its prompt is being computed."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""

    @classmethod
    def from_message(cls, message: pb.Admitted) -> Admitted:
        """Reads it from the protocol's message."""
        return cls(message.request_id, message.model, message.prompt_tokens, message.cached_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token."""

    token_id: int
    logprob: float
    """Natural logarithm, from the distribution before temperature and filters."""
    text: str

    @classmethod
    def from_message(cls, message: pb.TokenLogprob) -> TokenLogprob:
        """Reads it from the protocol's message."""
        return cls(message.token_id, message.logprob, message.text)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The most likely tokens, most likely first."""

    @classmethod
    def from_message(cls, message: pb.TokenLogprobs) -> TokenLogprobs:
        """Reads it from the protocol's message."""
        return cls(
            TokenLogprob.from_message(message.sampled), tuple(map(TokenLogprob.from_message, message.top))
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one candidate: only what no earlier delta carried."""

    index: int
    """Candidate, 0 to n - 1."""
    text: str
    """Can be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One entry for each new token, if they were asked for."""

    @classmethod
    def from_message(cls, message: pb.Delta) -> Delta:
        """Reads it from the protocol's message."""
        return cls(
            message.index,
            message.text,
            tuple(message.token_ids),
            tuple(map(TokenLogprobs.from_message, message.logprobs)),
        )


class FinishReason(enum.StrEnum):
    """Why a candidate ended."""

    STOP = "stop"
    """An end-of-text token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context was reached."""
    CANCELLED = "cancelled"
    """It was cancelled by name."""
    UNKNOWN = "unknown"
    """A reason that a newer server has and this client doesn't."""


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one candidate."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    output_tokens: int
    """Tokens generated, end-of-text included."""
    preemptions: int
    """Times that it was recomputed, for want of memory or since its worker was lost."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one candidate's time went, as the scheduler saw it, in seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    time_to_first_token_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one candidate."""

    index: int
    reason: FinishReason
    stop: str | int | None
    """The stop string (str) or the stop or end-of-text token (int) that ended it, if one did."""
    usage: Usage
    timings: Timings

    @classmethod
    def from_message(cls, message: pb.Finished) -> Finished:
        """Reads it from the protocol's message."""
        usage, timings = message.usage, message.timings
        match message.WhichOneof("stop"):
            case "stop_string":
                stop: str | int | None = message.stop_string
            case "stop_token_id":
                stop = message.stop_token_id
            case _:
                stop = None
        return cls(
            index=message.index,
            reason=_FINISH_REASONS.get(message.reason, FinishReason.UNKNOWN),
            stop=stop,
            usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.preemptions),
            timings=Timings(
                queue_s=_seconds(timings.queue),
                prefill_s=_seconds(timings.prefill),
                decode_s=_seconds(timings.decode),
                preempted_s=_seconds(timings.preempted),
                time_to_first_token_s=_seconds(timings.time_to_first_token),
            ),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """All of one candidate."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The tokens of a prompt."""

    token_ids: tuple[int, ...]
    max_model_len: int
    """Most tokens, prompt and output together, that the model takes."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

    name: str
    max_model_len: int
    """Most tokens, prompt and output together."""
    vocab_size: int
    ready_workers: int
    has_chat_template: bool

    @classmethod
    def from_message(cls, message: pb.Model) -> Model:
        """Reads it from the protocol's message."""
        return cls(
            message.name,
            message.max_model_len,
            message.vocab_size,
            message.ready_workers,
            message.has_chat_template,
        )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
