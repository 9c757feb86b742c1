"""A scheduler without a scheduler: answers as a test tells it to, and records what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc

Answer = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]
AttachAnswer = Callable[[pb.AttachRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


def admitted(request_id: str = "r1") -> pb.GenerateResponse:
    return pb.GenerateResponse(
        admitted=pb.Admitted(request_id=request_id, model="fake", prompt_tokens=5, cached_tokens=2)
    )


def delta(text: str, *token_ids: int, index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=text, token_ids=token_ids))


def finished(
    index: int = 0, reason: int = pb.FINISH_REASON_LENGTH, output_tokens: int = 2
) -> pb.GenerateResponse:
    end = pb.Finished(index=index, reason=reason)
    end.usage.MergeFrom(
        pb.Usage(prompt_tokens=5, cached_tokens=2, output_tokens=output_tokens, preemptions=1)
    )
    for name, milliseconds in [("queue", 5), ("prefill", 20), ("decode", 500), ("time_to_first_token", 25)]:
        getattr(end.timings, name).FromMilliseconds(milliseconds)
    return pb.GenerateResponse(finished=end)


def hello(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield admitted(request.request_id or "r1")
    yield delta("Hello", 10)
    yield delta(" world", 11)
    yield finished()


def abort(
    context: grpc.ServicerContext,
    code: int,
    message: str,
    *,
    reason: str = "",
    metadata: dict[str, str] | None = None,
    retry_after_ms: int | None = None,
    violations: dict[str, str] | None = None,
) -> None:
    """Ends the call with a status and google.rpc details."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="tidegate.dev", metadata=metadata)]
    if retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_after_ms)
        details.append(retry)
    if violations:
        bad = error_details_pb2.BadRequest()
        for field, description in violations.items():
            bad.field_violations.add(field=field, description=description)
        details.append(bad)
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))


def failing(times: int, code: int = code_pb2.UNAVAILABLE, **details: object) -> Answer:
    """Fails the first `times` calls, then answers `hello`."""
    calls = iter(range(times))

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if next(calls, None) is not None:
            abort(context, code, "not now", **details)
        yield from hello(request, context)

    return answer


class FakeInference(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Serves on a free port of 127.0.0.1 until stop()."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(max_workers=8))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.reset()
        self._server.start()

    def reset(self) -> None:
        """Forgets what it was asked and told, for the next test."""
        self.answer: Answer = hello
        self.attach_answer: AttachAnswer | None = None  # None: as a server that has no Attach
        self.requests: list[pb.GenerateRequest] = []
        self.attach_requests: list[pb.AttachRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.timeouts_s: list[float | None] = []
        self.call_started = threading.Event()
        self.call_ended = threading.Event()
        self.models = ["a", "b"]
        self.cancelled_ids: list[str] = []
        self.cancel_metadata: dict[str, str] = {}
        self.state = admin_pb2.GetStateResponse(version="0.1.0", running_requests=1)

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.AttachResponse]:
        self.attach_requests.append(request)
        if self.attach_answer is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        for event in self.attach_answer(request, context):
            yield pb.AttachResponse(event=event)

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def hang(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        """Sends one delta, then nothing until the call ends."""
        yield admitted()
        yield delta("Hello", 10)
        self.call_ended.wait(timeout=30)

    def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.timeouts_s.append(context.time_remaining())
        context.add_callback(self.call_ended.set)
        self.call_started.set()
        yield from self.answer(request, context)

    def Cancel(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        self.cancelled_ids.append(request.request_id)
        self.cancel_metadata = dict(context.invocation_metadata())
        return pb.CancelResponse(found=request.request_id == "r1")

    def Tokenize(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        text = request.text or "".join(message.content for message in request.chat.messages)
        if request.model not in ("", "fake"):
            abort(context, code_pb2.NOT_FOUND, f"no model {request.model!r}", reason="MODEL_NOT_FOUND")
        return pb.TokenizeResponse(token_ids=text.encode(), max_model_len=512)

    def Detokenize(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(self, request, context):
        """One model a page."""
        self.metadata.append(dict(context.invocation_metadata()))
        page = int(request.page_token or 0)
        more = page + 1 < len(self.models)
        return pb.ListModelsResponse(
            models=[_model(self.models[page])], next_page_token=str(page + 1) if more else ""
        )

    def GetState(self, request, context):
        return self.state

    def ListRequests(self, request, context):
        if not request.page_token:
            live = admin_pb2.RequestState(request_id="r1", status=admin_pb2.REQUEST_STATUS_RUNNING)
            return admin_pb2.ListRequestsResponse(requests=[live], next_page_token="2")
        return admin_pb2.ListRequestsResponse(requests=[admin_pb2.RequestState(request_id="r2")])

    def DrainWorker(self, request, context):
        if request.worker_id != "w1":
            abort(context, code_pb2.NOT_FOUND, f"no worker {request.worker_id!r}", reason="WORKER_NOT_FOUND")
        return admin_pb2.DrainWorkerResponse(moved_requests=3)

    def ResetPrefixCache(self, request, context):
        return admin_pb2.ResetPrefixCacheResponse(blocks=7)


def _model(name: str) -> pb.Model:
    return pb.Model(name=name, max_model_len=512, vocab_size=49152, ready_workers=1, has_chat_template=True)
