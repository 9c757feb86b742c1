"""Owns what a driver answered: typed access to it, the rules of order, and the names for expectations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict

from tidegate.inference.v1 import inference_pb2 as pb

_SAFE_BUILTINS = {
    function.__name__: function
    for function in (
        abs,
        all,
        any,
        bool,
        dict,
        enumerate,
        float,
        int,
        len,
        list,
        max,
        min,
        range,
        repr,
        round,
    )
} | {function.__name__: function for function in (set, sorted, str, sum, tuple, zip)}


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one candidate, flat."""

    reason: str  # without FINISH_REASON_
    stop_string: str | None
    stop_token_id: int | None
    usage: pb.Usage
    timings: pb.Timings


class Reply:
    """One answer. Its public attributes are the names that expectations may use."""

    def __init__(self, method: str, answer: dict[str, Any], elapsed_s: float) -> None:
        self.method = method
        self.elapsed_s = elapsed_s
        self.code: str = answer["code"]
        self.message: str = answer["message"]
        self.error: dict[str, Any] | None = answer["error"]
        error = self.error or {}
        self.reason: str = error.get("reason", "")
        self.domain: str = error.get("domain", "")
        self.info: dict[str, str] = error.get("metadata", {})
        self.retry_after_ms: float | None = error.get("retry_after_ms")
        self.violations: list[str] = [field for field, _ in error.get("violations", [])]
        self.violation_texts: list[str] = [text for _, text in error.get("violations", [])]
        self.quota: list[str] = [subject for subject, _ in error.get("quota", [])]
        # Attach's messages are the events in them, which are those of Generate.
        response = getattr(pb, ("Generate" if method == "Attach" else method) + "Response")
        self.messages: list[Any] = [ParseDict(message, response()) for message in answer["messages"]]
        self.first: Any = self.messages[0] if self.messages else None
        self.during: list[Reply] = []

    @property
    def is_stream(self) -> bool:
        """Whether the method streams a generation."""
        return self.method in ("Generate", "Attach")

    @property
    def kinds(self) -> list[str]:
        """What the messages are: admitted, delta, finished, or unknown."""
        return [message.WhichOneof("event") or "unknown" for message in self.messages]

    @property
    def admitted(self) -> pb.Admitted:
        """The first Admitted."""
        return next(m.admitted for m in self.messages if m.HasField("admitted"))  # type: ignore[no-any-return]

    def deltas(self, index: int = 0) -> list[pb.Delta]:
        """The deltas of one candidate."""
        return [m.delta for m in self.messages if m.HasField("delta") and m.delta.index == index]

    def text(self, index: int = 0) -> str:
        """The text of one candidate."""
        return "".join(delta.text for delta in self.deltas(index))

    def tokens(self, index: int = 0) -> list[int]:
        """The token ids of one candidate."""
        return [token for delta in self.deltas(index) for token in delta.token_ids]

    def logprobs(self, index: int = 0) -> list[pb.TokenLogprobs]:
        """The log-probabilities of one candidate."""
        return [entry for delta in self.deltas(index) for entry in delta.logprobs]

    def finished(self, index: int = 0) -> Finish:
        """How one candidate ended."""
        found = [m.finished for m in self.messages if m.HasField("finished") and m.finished.index == index]
        if not found:
            raise AssertionError(f"candidate {index} has no Finished")
        end = found[0]
        try:
            reason = pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_")
        except ValueError:
            reason = str(int(end.reason))
        stop = end.WhichOneof("stop")
        return Finish(
            reason,
            end.stop_string if stop == "stop_string" else None,
            end.stop_token_id if stop == "stop_token_id" else None,
            end.usage,
            end.timings,
        )

    def names(self, earlier: dict[str, Any]) -> dict[str, Any]:
        """Names for an expectation: this reply's attributes, and earlier replies by their own names."""
        own = _NAMES
        if self.is_stream:
            own = own | _GENERATE_NAMES
            if any(message.HasField("admitted") for message in self.messages):
                own = own | {"admitted"}
        return {**earlier, **{name: getattr(self, name) for name in own}}


_NAMES = {"elapsed_s", "code", "message", "messages", "first"}
_NAMES |= {"error", "reason", "domain", "info", "retry_after_ms", "violations", "violation_texts", "quota"}
_GENERATE_NAMES = {"kinds", "deltas", "text", "tokens", "logprobs", "finished", "during"}


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """The value of an expression of a case file, which is part of this repository."""
    return eval(expression, {"__builtins__": _SAFE_BUILTINS, **names})  # noqa: S307


def broken_stream_rules(reply: Reply, request: pb.GenerateRequest) -> list[str]:
    """What a stream that ended with OK did against the order and counts that the proto promises."""
    kinds = [kind for kind in reply.kinds if kind != "unknown"]
    broken = []
    if not kinds or kinds[0] != "admitted" or kinds.count("admitted") != 1:
        broken.append(f"Admitted must come once and first, got {kinds[:3]}")
    ended: set[int] = set()
    for message in reply.messages:
        event = message.WhichOneof("event")
        if event == "delta" and message.delta.index in ended:
            broken.append(f"a delta after the end of candidate {message.delta.index}")
        if event == "finished":
            if message.finished.index in ended:
                broken.append(f"candidate {message.finished.index} finished twice")
            ended.add(message.finished.index)
    count = request.n if request.HasField("n") else 1
    if ended != set(range(count)):
        broken.append(f"{count} candidates must finish, got {sorted(ended)}")
    return broken or _broken_counts(reply, request, sorted(ended))


def _broken_counts(reply: Reply, request: pb.GenerateRequest, candidates: list[int]) -> list[str]:
    broken = []
    wants_ids = request.output.token_ids if request.output.HasField("token_ids") else True
    for index in candidates:
        usage, tokens = reply.finished(index).usage, reply.tokens(index)
        if wants_ids and usage.output_tokens != len(tokens):
            broken.append(f"candidate {index}: usage says {usage.output_tokens} tokens, {len(tokens)} came")
        if usage.prompt_tokens != reply.admitted.prompt_tokens:
            broken.append(f"candidate {index}: usage and Admitted differ on the prompt's tokens")
        if request.output.HasField("logprobs") and len(reply.logprobs(index)) != len(tokens):
            broken.append(
                f"candidate {index}: {len(reply.logprobs(index))} logprobs for {len(tokens)} tokens"
            )
    return broken
