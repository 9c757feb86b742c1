"""The synchronous client: calls that wait in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from tidegate_client import requests
from tidegate_client.base import BaseClient, Metadata
from tidegate_client.channel import open_channel
from tidegate_client.errors import from_rpc_error
from tidegate_client.requests import Messages, ResultT, UnaryCall
from tidegate_client.stream import Stream
from tidegate_client.types import Model, TokenizedPrompt


class Client(BaseClient[Stream]):
    """Talks to a scheduler. Safe for use by several threads; connects when it is first used.

    address: host:port, or several with commas, which take turns. Default: TIDEGATE_ADDRESS, or
        localhost:50051.
    timeout_s: default time limit of a request, retries included. None: none for streams, 60 s for others.
    retry: when to try again. None: never.
    tls: encryption, with the files for it. None: TIDEGATE_TLS_CA and its like, or no encryption.
    token: the client's credential. None: TIDEGATE_TOKEN, or none. It never goes over a network unencrypted.
    credentials: gRPC's own kind, in place of tls.
    metadata: sent with every call, beside the active OpenTelemetry span's traceparent.
    """

    _stream_class = Stream

    def _open_channel(self, address: str | None, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        return open_channel(address, credentials)

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> TokenizedPrompt:
        """Returns the token ids that generate() or chat() would use."""
        return self._unary(requests.tokenize_call(prompt, model, add_special_tokens), metadata)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> str:
        """Returns the text of token ids."""
        return self._unary(requests.detokenize_call(token_ids, model, skip_special_tokens), metadata)

    def list_models(self, *, metadata: Metadata = ()) -> list[Model]:
        """Returns the models that are served. An empty list means that no worker is connected yet."""
        models, page_token = self._unary(requests.list_models_call(""), metadata)
        while page_token:
            page, page_token = self._unary(requests.list_models_call(page_token), metadata)
            models += page
        return models

    def cancel(self, request_id: str, *, metadata: Metadata = ()) -> bool:
        """Cancels a request by name, whoever started it. Returns whether it was live."""
        return self._unary(requests.cancel_call(request_id), metadata)

    def close(self) -> None:
        """Closes the channel; streams that are open are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, call: UnaryCall[Any, ResultT], metadata: Metadata = ()) -> ResultT:
        all_metadata = self._headers(metadata)
        attempts = self._unary_attempts()
        method = getattr(self._stub, call.method)
        while True:
            try:
                answer = method(call.request, timeout=attempts.remaining_s(), metadata=all_metadata)
            except grpc.RpcError as rpc_error:
                time.sleep(attempts.pause_s(from_rpc_error(rpc_error)))
            else:
                return call.parse(answer)
