"""Owns where a stream goes on for a client that has its beginning: what it says that it has, and the cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler_service.candidate_output import Delta, Finished
from scheduler_service.errors import Violations
from scheduler_service.generation_stream import StreamEvent
from scheduler_service.validation import MAX_N
from tidegate.inference.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Received:
    """What a client has of one candidate."""

    num_tokens: int
    text_bytes: int  # of UTF-8
    finished: bool


class Seam:
    """Leaves out of a whole stream what its client has.

    Tokens and text are cut each by their own measure: the text of a token may come with a later one, so that
    both need not end together in any delta.
    """

    def __init__(self, received: Mapping[int, Received]) -> None:
        self._received = dict(received)

    def cut(self, event: StreamEvent) -> StreamEvent | None:
        """The part of the next event that the client lacks; None: nothing."""
        has = None if not isinstance(event, Delta | Finished) else self._received.get(event.index)
        if has is None:
            return event
        if isinstance(event, Delta):
            return _cut(event, has)
        return None if has.finished else event


def _cut(delta: Delta, has: Received) -> Delta | None:
    num_tokens = min(has.num_tokens, len(delta.token_ids))
    has.num_tokens -= num_tokens
    text = delta.text
    if has.text_bytes:
        encoded = text.encode()
        text = encoded[has.text_bytes :].decode(errors="replace")
        has.text_bytes -= min(has.text_bytes, len(encoded))
    rest = replace(
        delta, text=text, token_ids=delta.token_ids[num_tokens:], logprobs=delta.logprobs[num_tokens:]
    )
    return rest if rest.text or rest.token_ids else None


def check_attach(request: pb.AttachRequest) -> Seam:
    """Where the stream goes on for that client. Raises ServiceError with all that is wrong."""
    wrong = Violations()
    if not request.request_id:
        wrong.note("request_id", "request_id is empty; name the request to go on with")
    received: dict[int, Received] = {}
    for i, entry in enumerate(request.received):
        if entry.index >= MAX_N or entry.index in received:
            wrong.note(
                f"received[{i}].index", f"index is {entry.index}; allowed: 0 to {MAX_N - 1}, each once"
            )
        received[entry.index] = Received(entry.num_tokens, entry.text_bytes, entry.finished)
    wrong.raise_any()
    return Seam(received)
