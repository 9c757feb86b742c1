"""What each path does: reads a request, starts its generation, answers.

Owns the steps of an exchange; what bodies and events look like is in other files.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import tidegate_client
from openai_gateway.answers import ChatForm, Head, chat_body, completion_body
from openai_gateway.chunks import ChatChunks, Chunks, CompletionChunks, ToolChunks, events_of
from openai_gateway.config import GatewayConfig
from openai_gateway.connection import OUTCOME, Drain, EventAnswer, JsonAnswer
from openai_gateway.conversation import turns_of
from openai_gateway.errors import CLIENT_CLOSED_REQUEST, HttpError, from_tidegate, internal, told_by
from openai_gateway.field_names import FieldNames
from openai_gateway.generation import Generation
from openai_gateway.keys import Keys, Metadata
from openai_gateway.metrics import Metrics
from openai_gateway.options import chat_options, completion_options, names_in, with_tenant
from openai_gateway.requests import ChatRequest, CommonFields, CompletionRequest, parse
from openai_gateway.structured import structured_options
from openai_gateway.tools import tools_of
from openai_gateway.upstream import Upstream
from tidegate_client import Model, TidegateError

# W3C trace context; what doesn't look like it would not pass as gRPC metadata either.
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?"),
    "tracestate": re.compile(r"[\x20-\x7e]{1,512}"),
}

_REQUEST_ID = "x-request-id"
_log = logging.getLogger("openai_gateway")

Choices = Sequence[tidegate_client.Generation]
Prompt = str | list[int]


class Endpoint:
    """An ASGI application from a function that takes a request and returns its answer."""

    def __init__(self, handle: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, be it with a refusal."""
        try:
            answer = await self._handle(Request(scope, receive))
        except TidegateError as error:
            answer = from_tidegate(error).response()
        except HttpError as error:
            answer = error.response()
        except ClientDisconnect:
            scope.setdefault("state", {})[OUTCOME] = CLIENT_CLOSED_REQUEST
            return
        except Exception:
            _log.exception("a request failed by a bug")
            answer = internal().response()
        await answer(scope, receive, send)


class Endpoints:
    """The paths of the API."""

    def __init__(
        self, config: GatewayConfig, upstream: Upstream, keys: Keys, metrics: Metrics, drain: Drain
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._keys = keys
        self._metrics = metrics
        self._drain = drain
        self._created = int(time.time())

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        metadata = self._admit(request)
        asked = parse(ChatRequest, await self._body(request))
        tools = tools_of(asked)
        options = self._options(asked, chat_options(asked) | structured_options(asked, tools))
        turns = turns_of(asked.messages, tools)
        form = ChatForm(tools, options.get("logprobs"))
        n = max(1, asked.n or 1)
        name = _name("chatcmpl")
        names = names_in(asked, calls_tools=tools is not None)

        def start() -> Generation:
            options["add_generation_prompt"] = asked.add_generation_prompt
            stream = self._upstream.client.chat(turns, metadata=metadata, request_id=name, **options)
            return Generation([stream], n)

        def chunks(model: str) -> ChatChunks:
            kind = ChatChunks if tools is None else ToolChunks
            return kind(_head(name, model), form, n, include_usage=_wants_usage(asked))

        def body(choices: Choices, generation: Generation) -> dict[str, Any]:
            return chat_body(_head(name, generation.model), choices, form, generation.usage())

        if asked.stream:
            return self._stream(asked, name, names, start, chunks)
        return self._whole(name, names, start, body)

    async def complete(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        metadata = self._admit(request)
        asked = parse(CompletionRequest, await self._body(request))
        options = self._options(asked, completion_options(asked) | structured_options(asked))
        prompts = asked.prompts()
        n = max(1, asked.n or 1)
        name = _name("cmpl")
        names = names_in(asked)
        has_logprobs = asked.logprobs is not None
        echoes = await self._echoes(asked, prompts, n, metadata)

        def start() -> Generation:
            client = self._upstream.client
            streams = [
                client.generate(prompt, metadata=metadata, request_id=f"{name}-{i}" if i else name, **options)
                for i, prompt in enumerate(prompts)
            ]
            return Generation(streams, n)

        def chunks(model: str) -> CompletionChunks:
            include_usage = _wants_usage(asked)
            head = _head(name, model)
            return CompletionChunks(head, echoes, include_usage=include_usage, has_logprobs=has_logprobs)

        def body(choices: Choices, generation: Generation) -> dict[str, Any]:
            head, usage = _head(name, generation.model), generation.usage()
            return completion_body(head, choices, echoes, usage, has_logprobs=has_logprobs)

        if asked.stream:
            return self._stream(asked, name, names, start, chunks)
        return self._whole(name, names, start, body)

    async def models(self, request: Request) -> ASGIApp:
        """GET /v1/models."""
        models = await self._upstream.client.list_models(metadata=self._admit(request))
        return JSONResponse({"object": "list", "data": [self._model(each) for each in models]})

    async def model(self, request: Request) -> ASGIApp:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        for each in await self._upstream.client.list_models(metadata=self._admit(request)):
            if each.name == name:
                return JSONResponse(self._model(each))
        raise HttpError(404, "the model is not served", code="model_not_found", param="model")

    async def health(self, request: Request) -> ASGIApp:
        """GET /health: 200 while requests are taken, else 503."""
        if self._drain.started:
            return JSONResponse({"status": "draining"}, 503)
        if not await self._upstream.is_ready():
            return JSONResponse({"status": "the scheduler can't be reached, or has no worker"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> ASGIApp:
        """GET /metrics, in Prometheus's text format."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _admit(self, request: Request) -> Metadata:
        """What goes with every call for this caller. Raises HttpError 401."""
        metadata = list(self._keys.admit(request.headers.get("authorization")))
        for name, form in _TRACE_HEADERS.items():
            value = request.headers.get(name)
            if value and form.fullmatch(value):
                metadata.append((name, value))
        return metadata

    def _whole(
        self,
        name: str,
        names: FieldNames,
        start: Callable[[], Generation],
        body: Callable[[Choices, Generation], dict[str, Any]],
    ) -> ASGIApp:
        async def make() -> dict[str, Any]:
            with told_by(names), start() as generation:
                return body(await generation.results(), generation)

        return JsonAnswer(self._drain, {_REQUEST_ID: name}, make)

    def _stream(
        self,
        asked: CommonFields,
        name: str,
        names: FieldNames,
        start: Callable[[], Generation],
        chunks: Callable[[str], Chunks],
    ) -> ASGIApp:
        async def events() -> AsyncGenerator[bytes]:
            with told_by(names), start() as generation:
                async for event in events_of(generation, chunks, include_usage=_wants_usage(asked)):
                    yield event

        return EventAnswer(self._drain, {_REQUEST_ID: name}, events())

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_mib * 2**20
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > limit:
                message = f"the body is larger than this gateway's max_body_mib = {self._config.max_body_mib}"
                raise HttpError(413, message)
        return bytes(parts)

    def _options(self, asked: CommonFields, options: dict[str, Any]) -> dict[str, Any]:
        return with_tenant(options, asked.user) if self._config.user_as_tenant else options

    async def _echoes(
        self, asked: CompletionRequest, prompts: list[Prompt], n: int, metadata: Metadata
    ) -> list[str]:
        """What each choice's text begins with."""
        if not asked.echo:
            return [""] * (len(prompts) * n)
        client = self._upstream.client
        texts = [
            prompt
            if isinstance(prompt, str)
            else await client.detokenize(prompt, model=asked.model, metadata=metadata)
            for prompt in prompts
        ]
        return [text for text in texts for _ in range(n)]

    def _model(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "tidegate",
            "max_model_len": model.max_model_len,
        }


def _name(kind: str) -> str:
    """The answer's id, which is the request's name at the scheduler as well."""
    return f"{kind}-{uuid.uuid4().hex}"


def _head(name: str, model: str) -> Head:
    return Head(name, int(time.time()), model)


def _wants_usage(asked: CommonFields) -> bool:
    return bool(asked.stream_options is not None and asked.stream_options.include_usage)
