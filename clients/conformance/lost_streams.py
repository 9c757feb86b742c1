"""Owns what the fake server does with streams that lose it: how they break, and how they go on by Attach.

The prompt `lose KIND` breaks a stream after its first tokens; its request's name begins with KIND, which
says what Attach answers. A client that counts wrongly what it has is refused with what it said.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tidegate.inference.v1 import inference_pb2 as pb

Context = Any
Events = Iterator[pb.GenerateResponse]
# What every broken stream has delivered of candidate 0.
_FIRST = pb.Received(index=0, num_tokens=2, text_bytes=len("Grüß".encode()))


class LostStreams:
    """Streams by the names of their requests."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()

    def generate(self, kind: str, context: Context) -> Events:
        """Delivers two tokens of candidate 0, and all of candidate 1 for `two`; then breaks."""
        yield _admitted(f"{kind}-{next(self._numbers)}")
        yield _delta("Gr", 1)
        yield _delta("üß", 2)
        if kind == "two":
            yield _delta("x", 8, index=1)
            yield _finished(1, index=1)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def attach(self, request: pb.AttachRequest, context: Context) -> Events:
        """Answers by the request's name."""
        kind = request.request_id.partition("-")[0]
        with self._lock:
            self._tries[request.request_id] += 1
            tries = self._tries[request.request_id]
        match kind:
            case "echo":
                yield from _echo(request, context)
            case "hang":
                yield from _hang(context)
            case "rest":
                yield from _rest(request, context, [_FIRST])
            case "two":
                ended = pb.Received(index=1, num_tokens=1, text_bytes=1, finished=True)
                yield from _rest(request, context, [_FIRST, ended])
            case "later":
                yield from _later(request, context, tries)
            case "again":
                yield from _again(request, context, tries)
            case "unknown":
                context.abort(grpc.StatusCode.NOT_FOUND, "not known")
            case "internal":
                context.abort(grpc.StatusCode.INTERNAL, "incident 4711")
            case _:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")


def _echo(request: pb.AttachRequest, context: Context) -> Events:
    seen = MessageToDict(request, preserving_proto_field_name=True)
    seen["metadata"] = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    yield from (_admitted("echo"), _delta(json.dumps(seen), 1), _finished(1))


def _hang(context: Context) -> Events:
    yield from (_admitted("hang"), _delta("one", 1))
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(timeout=120)


def _rest(request: pb.AttachRequest, context: Context, wanted: list[pb.Received]) -> Events:
    _check(request, context, wanted)
    yield _admitted(request.request_id)
    yield _delta(" Gott", 3)
    yield _finished(3 if wanted[0].num_tokens == 2 else 4)


def _later(request: pb.AttachRequest, context: Context, tries: int) -> Events:
    if tries <= 2:
        context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")
    if tries == 3:
        info = error_details_pb2.ErrorInfo(reason="REQUEST_ID_IN_USE", domain="tidegate.dev")
        status = status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="in use")
        status.details.add().Pack(info)
        context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        context.abort(grpc.StatusCode.ALREADY_EXISTS, "in use")
    yield from _rest(request, context, [_FIRST])


def _again(request: pb.AttachRequest, context: Context, tries: int) -> Events:
    if tries > 1:
        more = pb.Received(index=0, num_tokens=3, text_bytes=_FIRST.text_bytes + 1)
        yield from _rest(request, context, [more])
        return
    _check(request, context, [_FIRST])
    yield from (_admitted(request.request_id), _delta("!", 9))
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def _check(request: pb.AttachRequest, context: Context, wanted: list[pb.Received]) -> None:
    if sorted(request.received, key=lambda entry: entry.index) != wanted:
        said = ", ".join(str(entry).replace("\n", " ") for entry in request.received)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the client has something else: {said}")


def _admitted(request_id: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(admitted=pb.Admitted(request_id=request_id, model="fake", prompt_tokens=1))


def _delta(text: str, token: int, index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=text, token_ids=[token]))


def _finished(tokens: int, index: int = 0) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=1, output_tokens=tokens)
    return pb.GenerateResponse(finished=pb.Finished(index=index, reason=pb.FINISH_REASON_STOP, usage=usage))
