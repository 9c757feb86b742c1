"""What the synchronous and the asynchronous client have in common: options, and how a stream is started.

Owns nothing that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, Unpack

import grpc

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1.inference_pb2_grpc import InferenceServiceStub
from tidegate_client import requests
from tidegate_client.access import Access, Tls, resolve_access
from tidegate_client.channel import are_several, resolve_address
from tidegate_client.recovery import Calls
from tidegate_client.requests import GenerateOptions, Messages
from tidegate_client.retry import Attempts, RetryPolicy
from tidegate_client.stream import AsyncStream, Stream
from tidegate_client.trace_context import trace_headers

Metadata = Sequence[tuple[str, str]]
"""gRPC metadata, such as a credential or a traceparent."""

StreamT = TypeVar("StreamT", Stream, AsyncStream)

# Starts a stream's first call, with its time limit in seconds and its headers.
_Start = Callable[[float | None, Metadata], Any]

_DEFAULT_RETRY = RetryPolicy()
_UNARY_TIMEOUT_S = 60.0


class BaseClient(Generic[StreamT]):
    """Starts streams; Client and AsyncClient add the calls that have one answer.

    address: host:port, or several with commas, which take turns. Default: TIDEGATE_ADDRESS, or
        localhost:50051.
    timeout_s: default time limit of a request, retries included. None: none for streams, 60 s for others.
    retry: when to try again. None: never.
    tls: encryption, with the files for it. None: TIDEGATE_TLS_CA and its like, or no encryption.
    token: the client's credential. None: TIDEGATE_TOKEN, or none. It never goes over a network unencrypted.
    credentials: gRPC's own kind, in place of tls.
    metadata: sent with every call, beside the active OpenTelemetry span's traceparent.
    """

    _stream_class: ClassVar[type[Any]]

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = _DEFAULT_RETRY,
        tls: Tls | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        self._address = resolve_address(address)
        access: Access = resolve_access(self._address, tls, token, credentials)
        self._channel = self._open_channel(address, access.credentials)
        self._stub = InferenceServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._retry = retry
        self._metadata: Metadata = (*access.metadata, *metadata)

    def _open_channel(self, address: str | None, credentials: grpc.ChannelCredentials | None) -> Any:
        raise AssertionError("Client and AsyncClient each open a channel of their own kind")

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> StreamT:
        """Starts a generation from a text or from token ids.

        timeout_s: the request's deadline, from now. Raises InvalidRequestError for values that can't be sent;
        all that the server has to say comes when the stream is read.
        """
        return self._stream(requests.generate_request(prompt, options), timeout_s, metadata)

    def chat(
        self,
        messages: str | Messages,
        *,
        add_generation_prompt: bool | None = None,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> StreamT:
        """Starts the answer to a conversation, which the server renders with the model's chat template."""
        request = requests.chat_request(messages, options, add_generation_prompt=add_generation_prompt)
        return self._stream(request, timeout_s, metadata)

    def attach(
        self,
        request_id: str,
        *,
        received: Sequence[pb.Received] = (),
        n: int = 1,
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> StreamT:
        """Goes on with a generation by its name, as after the end of the process that started it.

        Streams do so by themselves when their scheduler ends. received: what is there already of each
        candidate; n: how many candidates the request has.
        """
        first = pb.AttachRequest(request_id=request_id, received=received)
        num_missing = n - sum(entry.finished for entry in received)
        return self._open(
            lambda remaining_s, headers: self._stub.Attach(first, timeout=remaining_s, metadata=headers),
            num_missing,
            Attempts(None, self._timeout_s if timeout_s is None else timeout_s),
            metadata,
        )

    def _stream(self, request: pb.GenerateRequest, timeout_s: float | None, metadata: Metadata) -> StreamT:
        return self._open(
            lambda remaining_s, headers: self._stub.Generate(request, timeout=remaining_s, metadata=headers),
            requests.num_candidates(request),
            Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s),
            metadata,
        )

    def _open(self, start: _Start, num_candidates: int, attempts: Attempts, metadata: Metadata) -> StreamT:
        headers = self._headers(metadata)

        def attach(attach_request: pb.AttachRequest, remaining_s: float | None) -> Any:
            return self._stub.Attach(attach_request, timeout=remaining_s, metadata=headers)

        calls = Calls(
            lambda remaining_s: start(remaining_s, headers), attach, several=are_several(self._address)
        )
        stream: StreamT = self._stream_class(calls, attempts, num_candidates)
        return stream

    def _headers(self, own: Metadata = ()) -> Metadata:
        """What is sent with a call that starts now: the active span's context, too, unless `own` has one."""
        given: Metadata = (*self._metadata, *own)
        if any(key == "traceparent" for key, _ in given):
            return given
        return (*given, *trace_headers())

    def _unary_attempts(self) -> Attempts:
        return Attempts(self._retry, _UNARY_TIMEOUT_S if self._timeout_s is None else self._timeout_s)
