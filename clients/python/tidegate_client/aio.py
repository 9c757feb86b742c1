"""The asynchronous client: the same calls for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from tidegate_client import requests
from tidegate_client.base import BaseClient, Metadata
from tidegate_client.channel import open_async_channel
from tidegate_client.errors import from_rpc_error
from tidegate_client.requests import Messages, ResultT, UnaryCall
from tidegate_client.stream import AsyncStream
from tidegate_client.types import Model, TokenizedPrompt


class AsyncClient(BaseClient[AsyncStream]):
    """Talks to a scheduler from one event loop, in which it must be made.

    address: host:port, or several with commas, which take turns. Default: TIDEGATE_ADDRESS, or
        localhost:50051.
    timeout_s: default time limit of a request, retries included. None: none for streams, 60 s for others.
    retry: when to try again. None: never.
    tls: encryption, with the files for it. None: TIDEGATE_TLS_CA and its like, or no encryption.
    token: the client's credential. None: TIDEGATE_TOKEN, or none. It never goes over a network unencrypted.
    credentials: gRPC's own kind, in place of tls.
    metadata: sent with every call, beside the active OpenTelemetry span's traceparent.

    generate() and chat() start at once and need no `await`; their streams are read with `async for`.
    """

    _stream_class = AsyncStream

    def _open_channel(
        self, address: str | None, credentials: grpc.ChannelCredentials | None
    ) -> grpc.aio.Channel:
        return open_async_channel(address, credentials)

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> TokenizedPrompt:
        """Returns the token ids that generate() or chat() would use."""
        return await self._unary(requests.tokenize_call(prompt, model, add_special_tokens), metadata)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> str:
        """Returns the text of token ids."""
        return await self._unary(requests.detokenize_call(token_ids, model, skip_special_tokens), metadata)

    async def list_models(self, *, metadata: Metadata = ()) -> list[Model]:
        """Returns the models that are served. An empty list means that no worker is connected yet."""
        models, page_token = await self._unary(requests.list_models_call(""), metadata)
        while page_token:
            page, page_token = await self._unary(requests.list_models_call(page_token), metadata)
            models += page
        return models

    async def cancel(self, request_id: str, *, metadata: Metadata = ()) -> bool:
        """Cancels a request by name, whoever started it. Returns whether it was live."""
        return await self._unary(requests.cancel_call(request_id), metadata)

    async def close(self) -> None:
        """Closes the channel; streams that are open are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, call: UnaryCall[Any, ResultT], metadata: Metadata = ()) -> ResultT:
        all_metadata = self._headers(metadata)
        attempts = self._unary_attempts()
        method = getattr(self._stub, call.method)
        while True:
            try:
                answer = await method(call.request, timeout=attempts.remaining_s(), metadata=all_metadata)
            except grpc.RpcError as rpc_error:
                await asyncio.sleep(attempts.pause_s(from_rpc_error(rpc_error)))
            else:
                return call.parse(answer)
