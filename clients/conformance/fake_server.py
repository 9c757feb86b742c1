"""Owns FakeInferenceServer: a peer that says what no real server says, so that clients can be held to it.

The prompt names the behaviour. Nothing here generates text.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from clients.conformance.lost_streams import LostStreams
from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2 as pb

Context = Any
Messages = Iterator[pb.GenerateResponse | bytes]
UNKNOWN_FIELD = b"\xfa\x3f\x05later"  # field 1023, five bytes


class FakeInferenceServer:
    """Answers Generate by the behaviour that the prompt names, Attach by the request's name, and GetState
    with its open streams.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self._open = 0
        self._cancelled = 0
        self._lock = threading.Lock()
        self._lost = LostStreams()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
        generate = grpc.unary_stream_rpc_method_handler(
            self._generate,
            request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=lambda message: (
                message if isinstance(message, bytes) else message.SerializeToString()
            ),
        )
        attach = grpc.unary_stream_rpc_method_handler(
            self._attach,
            request_deserializer=pb.AttachRequest.FromString,
            response_serializer=pb.AttachResponse.SerializeToString,
        )
        cancel = grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: pb.CancelResponse(found=True),
            request_deserializer=pb.CancelRequest.FromString,
            response_serializer=pb.CancelResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "tidegate.inference.v1.InferenceService",
                    {"Generate": generate, "Attach": attach, "Cancel": cancel},
                )
            ]
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_FakeAdmin(self), self._server)
        self.port = self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        """Close the port and all streams."""
        self._server.stop(grace=None).wait()

    def state(self) -> admin_pb2.GetStateResponse:
        """Open streams as running requests."""
        with self._lock:
            counters = admin_pb2.Counters(requests_cancelled=self._cancelled)
            return admin_pb2.GetStateResponse(running_requests=self._open, counters=counters)

    def _generate(self, request: pb.GenerateRequest, context: Context) -> Messages:
        name, _, argument = request.text.partition(" ")
        behaviour = {**BEHAVIOURS, "lose": self._lost.generate}.get(name)
        if behaviour is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no such behaviour: {name!r}")
            return
        self._opened(context)
        yield from behaviour(argument, context)

    def _attach(self, request: pb.AttachRequest, context: Context) -> Iterator[pb.AttachResponse]:
        self._opened(context)
        for event in self._lost.attach(request, context):
            yield pb.AttachResponse(event=event)

    def _opened(self, context: Context) -> None:
        with self._lock:
            self._open += 1
        context.add_callback(self._closed)

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1
            self._cancelled += 1


class _FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, server: FakeInferenceServer) -> None:
        self._fake = server

    def GetState(self, request: admin_pb2.GetStateRequest, context: Context) -> admin_pb2.GetStateResponse:
        return self._fake.state()


def _admitted() -> pb.GenerateResponse:
    return pb.GenerateResponse(admitted=pb.Admitted(request_id="fake", model="fake", prompt_tokens=1))


def _delta(text: str, token: int = 1) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[token]))


def _finished(tokens: int, reason: int = 1) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=1, output_tokens=tokens)
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage))  # type: ignore[arg-type]


def _echo(_argument: str, context: Context) -> Messages:
    """What the server saw of the call, as JSON in the text."""
    seen = {
        "metadata": {key: value for key, value in context.invocation_metadata() if isinstance(value, str)},
        "remaining_s": context.time_remaining(),
    }
    yield from (_admitted(), _delta(json.dumps(seen)), _finished(1))


def _unknown_field(_argument: str, _context: Context) -> Messages:
    """Every message has a field of a later version."""
    for message in (_admitted(), _delta("known"), _finished(1)):
        yield message.SerializeToString() + UNKNOWN_FIELD


def _unknown_event(_argument: str, _context: Context) -> Messages:
    """A kind of event that this version does not have."""
    yield _admitted()
    yield UNKNOWN_FIELD
    yield from (_delta("after"), _finished(1))


def _unknown_reason(_argument: str, _context: Context) -> Messages:
    """A reason to finish that this version does not have."""
    yield from (_admitted(), _delta("x"), _finished(1, reason=77))


def _large(argument: str, _context: Context) -> Messages:
    """One delta of so many characters."""
    yield from (_admitted(), _delta("é" * int(argument)), _finished(1))


def _many(argument: str, _context: Context) -> Messages:
    """So many small deltas."""
    yield _admitted()
    for number in range(int(argument)):
        yield _delta(f"{number} ", number)
    yield _finished(int(argument))


def _split(_argument: str, _context: Context) -> Messages:
    """Text outside the basic plane, with controls and quotes, in several deltas."""
    yield _admitted()
    parts = ["日本", "語 🌊", '\u0000\t"\\', "e\u0301", "👩\u200d👩\u200d👧 ", "\u2028end"]
    for number, part in enumerate(parts):
        yield _delta(part, number)
    yield _finished(len(parts))


def _idle(argument: str, _context: Context) -> Messages:
    """A pause of so many seconds in the middle."""
    yield _admitted()
    time.sleep(float(argument))
    yield from (_delta("awake"), _finished(1))


def _hang(_argument: str, context: Context) -> Messages:
    """Nothing more after the first delta, until the client is gone."""
    yield from (_admitted(), _delta("one"))
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(timeout=120)


def _details(_argument: str, context: Context) -> Messages:
    """A refusal with every kind of detail, and one of a kind that no client knows."""
    error = error_details_pb2
    details = [
        error.ErrorInfo(reason="QUEUE_FULL", domain="tidegate.dev", metadata={"limit": "5", "waiting": "5"}),
        error.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=250_000_000)),
        error.BadRequest(
            field_violations=[
                error.BadRequest.FieldViolation(field="sampling.top_p", description="must be above 0, got 0"),
                error.BadRequest.FieldViolation(field="n", description="at most 64, got 99"),
            ]
        ),
        error.QuotaFailure(
            violations=[error.QuotaFailure.Violation(subject="tenant:a", description="5 of 5 requests wait")]
        ),
    ]
    packed = [any_pb2.Any(type_url="type.googleapis.com/later.v9.Detail", value=b"\x08\x01")]
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    _abort(
        context,
        status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="the queue is full", details=packed),
    )
    yield from ()


def _no_details(_argument: str, context: Context) -> Messages:
    """A status and nothing beside it."""
    context.abort(grpc.StatusCode.INTERNAL, "incident 4711")
    yield from ()


def _bad_details(_argument: str, context: Context) -> Messages:
    """Details that are no protobuf."""
    context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff\xff\xff")])
    context.abort(grpc.StatusCode.UNAVAILABLE, "try later")
    yield from ()


def _mid_stream(_argument: str, context: Context) -> Messages:
    """An error after some text."""
    yield from (_admitted(), _delta("half"))
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="tidegate.dev"))
    _abort(context, status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone — später", details=[detail]))


def _abort(context: Context, status: status_pb2.Status) -> None:
    codes = {code.value[0]: code for code in grpc.StatusCode}
    context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
    context.abort(codes[status.code], status.message)


BEHAVIOURS: dict[str, Callable[[str, Context], Messages]] = {
    "echo": _echo,
    "unknown-field": _unknown_field,
    "unknown-event": _unknown_event,
    "unknown-reason": _unknown_reason,
    "large": _large,
    "many": _many,
    "split": _split,
    "idle": _idle,
    "hang": _hang,
    "details": _details,
    "no-details": _no_details,
    "bad-details": _bad_details,
    "mid-stream": _mid_stream,
}
