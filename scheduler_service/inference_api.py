"""Owns the translation between InferenceService and the frontend. It decides nothing.

Whatever goes wrong ends an RPC with a status of errors.py; what nobody expected is logged under an incident
id, and the client gets only that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from scheduler_service import auth, errors
from scheduler_service.call_counts import CallCounts
from scheduler_service.candidate_output import Delta, Finished
from scheduler_service.core.events import FinishReason
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.errors import Reason, ServiceError, Violation, invalid_request
from scheduler_service.frontend import Frontend, Generation
from scheduler_service.generation_stream import StreamEvent
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.text.tokenizer import TextTokenizer
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
REQUEST_ID_METADATA = "tidegate-request-id"
_RETRY_PUSHBACK_METADATA = "grpc-retry-pushback-ms"
_MAX_STATUSES_KEPT = 256

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

_log = EventLog("inference_api")

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, Any, _Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are no message of its type."""

    type_name: str


def _answers_errors(handler: _Handler) -> _Handler:
    """Turns exceptions of a handler into statuses."""

    @functools.wraps(handler)
    async def answering(self: Any, request: Any, context: _Context) -> Any:
        try:
            if isinstance(request, _Malformed):
                text = f"the bytes are not a {request.type_name}; strings must be UTF-8"
                raise invalid_request([Violation("request", text)])
            return await handler(self, request, context)
        except ServiceError as error:
            return await _abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception:
            incident_id = new_incident_id()
            _log.error("internal_error", rpc=handler.__name__, incident_id=incident_id)
            return await _abort(context, errors.internal(incident_id))

    return answering


class InferenceApi(pb_grpc.InferenceServiceServicer):
    """InferenceService for grpc.aio."""

    def __init__(self, frontend: Frontend, counts: CallCounts | None = None) -> None:
        """`counts` are told of each delta."""
        self._frontend = frontend
        self._counts = counts or CallCounts()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service; unlike with the generated function, malformed bytes get a status with details."""
        handlers = {}
        for method in SERVICE.methods:
            new_handler = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = new_handler(
                getattr(self, method.name),
                request_deserializer=_lenient_parser(message_factory.GetMessageClass(method.input_type)),
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))

    @_answers_errors
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        """Streams one generation. The request's name is in the initial metadata as soon as it is accepted."""
        request.tenant = auth.bound_tenant(request.tenant)
        generation = await self._frontend.generate(request, context.time_remaining())
        stream = generation.stream
        try:
            await context.send_initial_metadata(((REQUEST_ID_METADATA, generation.request_id),))
            while (event := await stream.next_event()) is not None:
                await context.write(_response(event, generation))
                self._counts.deltas += isinstance(event, Delta)
        finally:
            # When the client goes, CancelledError comes from whichever await is current.
            stream.close()

    @_answers_errors
    async def Attach(self, request: pb.AttachRequest, context: _Context) -> None:
        """Streams the rest of a generation."""
        generation, seam = await self._frontend.attach(request, auth.tenant_limit())
        stream = generation.stream
        try:
            await context.send_initial_metadata(((REQUEST_ID_METADATA, generation.request_id),))
            while (event := await stream.next_event()) is not None:
                rest = seam.cut(event)
                if rest is not None:
                    await context.write(pb.AttachResponse(event=_response(rest, generation)))
                    self._counts.deltas += isinstance(rest, Delta)
        finally:
            stream.close()

    @_answers_errors
    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """Cancels a request."""
        return pb.CancelResponse(found=await self._frontend.cancel(request, auth.tenant_limit()))

    @_answers_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Converts a prompt to token ids."""
        token_ids, max_model_len = await self._frontend.tokenize(request)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    @_answers_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Converts token ids to text."""
        return pb.DetokenizeResponse(text=await self._frontend.detokenize(request))

    @_answers_errors
    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """Lists the models that are served."""
        page = self._frontend.list_models(request)
        models = [
            pb.Model(
                name=model.name,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                ready_workers=model.ready_workers,
                has_chat_template=bool(model.chat_template),
            )
            for model in page.models
        ]
        return pb.ListModelsResponse(models=models, next_page_token=page.next_page_token)


_Sendable: TypeAlias = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
_full_queue_statuses: dict[tuple[str, float | None], _Sendable] = {}


async def _abort(context: _Context, error: ServiceError) -> None:
    if error.reason is not Reason.QUEUE_FULL:
        await context.abort(*_sendable(error))
        return
    # Thousands are told so at once, in few different words: building them costs more than sending them.
    key = error.message, error.retry_after_s
    sendable = _full_queue_statuses.get(key)
    if sendable is None:
        if len(_full_queue_statuses) >= _MAX_STATUSES_KEPT:
            _full_queue_statuses.clear()
        sendable = _full_queue_statuses[key] = _sendable(error)
    await context.abort(*sendable)


def _sendable(error: ServiceError) -> _Sendable:
    status = rpc_status.to_status(errors.to_status(error))
    trailing = list(status.trailing_metadata)
    if error.retry_after_s is not None:
        trailing.append((_RETRY_PUSHBACK_METADATA, str(math.ceil(error.retry_after_s * 1000))))
    return status.code, status.details, tuple(trailing)


def _lenient_parser(message_class: type[Message]) -> Callable[[bytes], Message | _Malformed]:
    def parse(data: bytes) -> Message | _Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return _Malformed(message_class.DESCRIPTOR.full_name)

    return parse


def _response(event: StreamEvent, generation: Generation) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        return _delta(event, generation)
    if isinstance(event, Finished):
        return pb.GenerateResponse(finished=_finished(event))
    admitted = pb.Admitted(
        request_id=generation.request_id,
        model=generation.model,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=event.cached_tokens,
    )
    return pb.GenerateResponse(admitted=admitted)


def _delta(delta: Delta, generation: Generation) -> pb.GenerateResponse:
    # Filled in place and from a list: a third of the time that constructors with values take.
    response = pb.GenerateResponse()
    message = response.delta
    message.index = delta.index
    message.text = delta.text
    if generation.sends_token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            message.logprobs.append(_token_logprobs(token_id, logprobs, generation.tokenizer))
    return response


def _token_logprobs(
    token_id: int, logprobs: TokenLogprobs, tokenizer: TextTokenizer | None
) -> pb.TokenLogprobs:
    def one(token_id: int, logprob: float) -> pb.TokenLogprob:
        text = "" if tokenizer is None else tokenizer.token_text(token_id)
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=text)

    top = [one(token_id, logprob) for token_id, logprob in logprobs.top]
    return pb.TokenLogprobs(sampled=one(token_id, logprobs.sampled), top=top)


def _finished(finished: Finished) -> pb.Finished:
    usage, timings = finished.usage, finished.timings
    message = pb.Finished(
        index=finished.index,
        reason=_FINISH_REASONS[finished.reason],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            preemptions=usage.preemptions,
        ),
        timings=pb.Timings(
            queue=_duration(timings.queue_s),
            prefill=_duration(timings.prefill_s),
            decode=_duration(timings.decode_s),
            preempted=_duration(timings.preempted_s),
        ),
    )
    if timings.time_to_first_token_s is not None:
        message.timings.time_to_first_token.CopyFrom(_duration(timings.time_to_first_token_s))
    if finished.stop_string is not None:
        message.stop_string = finished.stop_string
    elif finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    return message


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
