"""Owns a request's way in: check, render, tokenize, resolve defaults, submit.

Its way out is a GenerationStream. No gRPC here. Failures are raised as ServiceError; anything else is a bug.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler_service import errors
from scheduler_service.arrivals import Arrivals
from scheduler_service.core.admission import Newcomer
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.step import Int32
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.errors import Reason, ServiceError, Violation, Violations, invalid_request
from scheduler_service.frontend_engine import Claim, FrontendEngine, OutputEngine
from scheduler_service.generation_stream import GenerationStream
from scheduler_service.grammar_compiler import GrammarCompiler
from scheduler_service.model_text import ModelText, ModelTexts
from scheduler_service.presentation import Presentation
from scheduler_service.prompt_validation import check_detokenize, check_tokenize
from scheduler_service.refusal_errors import refused
from scheduler_service.seam import Seam, check_attach
from scheduler_service.served_model import ServedModel
from scheduler_service.text.chat_template import ChatTemplate, ChatTemplateError
from scheduler_service.text.output_text import OutputText
from scheduler_service.text.stop_strings import StopStrings
from scheduler_service.text.tokenizer import TextTokenizer
from scheduler_service.turnstile import Turnstile
from scheduler_service.validation import DEFAULT_TENANT, MAX_N, GenerateOptions, check_generate
from tidegate.inference.v1 import inference_pb2 as pb

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


class FrontendConfig(Protocol):
    """What the frontend needs of the service's options."""

    @property
    def default_max_tokens(self) -> int:
        """Most tokens to generate where a request does not say."""
        ...

    @property
    def queue_timeout(self) -> float:
        """Longest wait in the queue where a request does not say, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that was accepted, and its stream. Close the stream when nobody reads it any more."""

    request_id: str
    model: str
    prompt_tokens: int
    sends_token_ids: bool
    tokenizer: TextTokenizer | None  # None: no text is sent
    stream: GenerationStream


@dataclass(frozen=True, slots=True)
class ModelPage:
    """A page of models by name."""

    models: Sequence[ServedModel]
    next_page_token: str  # empty: there is none


class Frontend:
    """Takes requests for an engine, in this process or another."""

    def __init__(
        self, engine: FrontendEngine, config: FrontendConfig, texts: ModelTexts | None = None
    ) -> None:
        """`texts` may have been made before requests come."""
        self._engine = engine
        self._config = config
        self._texts = texts or ModelTexts()
        self._grammars = GrammarCompiler()
        self._turnstile = Turnstile()
        self._arrivals = Arrivals()

    async def generate(self, request: pb.GenerateRequest, timeout_s: float | None) -> Generation:
        """Submits a request. `timeout_s` is what its RPC has left; None: no limit. Raises ServiceError."""
        if self._engine.draining:
            raise errors.draining()
        arrival = self._engine.now()
        deadline = None if timeout_s is None else arrival + timeout_s
        newcomer = self._turn_away(request)
        with self._arrivals.during(newcomer.tenant, newcomer.num):
            options = check_generate(request, self._engine.models())
            text = await self._texts.get(options.model) if options.model.tokenizer_json else None
            prompt = options.prompt_token_ids
            if prompt is None:
                prompt = await self._tokenize_prompt(request, options.model, text)
            grammar = await self._compile(options, text)
        # From here on nothing waits before the engine has the request.
        stopping = options.stopping(len(prompt), self._config.default_max_tokens)
        if deadline is not None and deadline <= self._engine.now():
            raise errors.deadline_exceeded()
        tokenizer = text.tokenizer if text is not None and options.text else None
        queue_timeout_s = options.queue_timeout_s or self._config.queue_timeout
        request_id = options.request_id or uuid.uuid4().hex
        shown = Presentation(options.text, options.token_ids, options.skip_special_tokens, options.stop)
        stream = self._new_stream(
            self._engine, request_id, options.n, shown, tokenizer, options.model.name, queue_timeout_s
        )
        spec = RequestSpec(
            request_id=request_id,
            model=options.model.name,
            prompt_token_ids=prompt,
            sampling=options.sampling,
            stopping=stopping,
            n=options.n,
            priority=options.priority,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            grammar=grammar,
            arrival=arrival,
            deadline=deadline,
            queue_timeout_s=queue_timeout_s,
            sink=stream,
        )
        await self._submit(spec, stream)
        return Generation(request_id, options.model.name, len(prompt), options.token_ids, tokenizer, stream)

    def _turn_away(self, request: pb.GenerateRequest) -> Newcomer:
        """Raises ServiceError where the queue is full, before a request costs more than that look."""
        tenant = request.tenant or DEFAULT_TENANT
        num = min(max(request.n, 1), MAX_N)  # what is beyond is refused later
        ahead, of_tenant = self._arrivals.num, self._arrivals.of(tenant)
        newcomer = Newcomer(request.request_id, tenant, num, ahead, of_tenant)
        refusal = self._engine.turn_away(newcomer)
        if refusal is not None:
            raise refused(refusal)
        return newcomer

    async def cancel(self, request: pb.CancelRequest, tenant: str | None = None) -> bool:
        """Ends a request; only one of `tenant`, if that is given. Whether it was live.

        Raises ServiceError if it is not named.
        """
        if not request.request_id:
            raise invalid_request(
                [Violation("request_id", "request_id is empty; name the request to cancel")]
            )
        # Another tenant's request is answered like one that is not there: names of others are not told.
        return await self._engine.cancel(request.request_id, tenant)

    async def tokenize(self, request: pb.TokenizeRequest) -> tuple[Sequence[int], int]:
        """The token ids of a prompt, and the model's length in tokens. Raises ServiceError."""
        model = check_tokenize(request, self._engine.models())
        text = await self._texts.get(model)
        if request.WhichOneof("prompt") == "chat":
            ids = await self._tokenize_chat(request.chat, text)
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            ids = await text.tokenizer.encode(request.text, add_special_tokens=special)
        return ids, model.max_model_len

    async def detokenize(self, request: pb.DetokenizeRequest) -> str:
        """The text of token ids. Raises ServiceError."""
        model = check_detokenize(request, self._engine.models())
        text = await self._texts.get(model)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return await text.tokenizer.decode(list(request.token_ids), skip_special_tokens=skip)

    def list_models(self, request: pb.ListModelsRequest) -> ModelPage:
        """A page of the models that are served. Raises ServiceError."""
        wrong = Violations()
        if request.page_size < 0:
            wrong.note(
                "page_size", f"page_size is {request.page_size}; allowed: 0 (the default) to {MAX_PAGE_SIZE}"
            )
        after = _name_in_page_token(request.page_token, wrong)
        wrong.raise_any()
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        models = self._engine.models()
        names = sorted(name for name in models if name > after)
        more = len(names) > size
        token = base64.urlsafe_b64encode(names[size - 1].encode()).decode() if more else ""
        return ModelPage([models[name] for name in names[:size]], token)

    async def _submit(self, spec: RequestSpec, stream: GenerationStream) -> None:
        accepted = False
        try:
            refusal = await self._engine.submit(spec)
            if refusal is not None:
                raise refused(refusal)
            accepted = True
        except EngineFaultError as fault:
            raise errors.internal(fault.incident_id) from fault
        finally:
            if not accepted:  # the client may have gone before the engine answered
                stream.close()

    async def _compile(self, options: GenerateOptions, text: ModelText | None) -> str:
        if options.form is None or text is None:  # validation refuses a form for a model without a tokenizer
            return ""
        return await self._grammars.compile(options.model, text.tokenizer.special_tokens, options.form)

    async def _tokenize_prompt(
        self, request: pb.GenerateRequest, model: ServedModel, text: ModelText | None
    ) -> Int32:
        assert text is not None  # noqa: S101 - validation refuses text for a model without a tokenizer
        if request.WhichOneof("prompt") == "chat":
            ids = await self._tokenize_chat(request.chat, text)
        else:
            ids = await text.tokenizer.encode(request.text, add_special_tokens=True)
        field = request.WhichOneof("prompt") or "prompt"
        if not ids:
            raise invalid_request([Violation(field, "the prompt has 0 tokens; allowed: at least 1")])
        column = np.array(ids, np.int32)
        if (largest := int(column.max())) >= model.vocab_size:  # tokenizers may know more tokens than models
            place = f"token {int(column.argmax())} of the prompt has id {largest}"
            why = f"{place}; {model.name} knows 0 to {model.vocab_size - 1}: leave that special token out"
            raise invalid_request([Violation(field, why)])
        return column

    async def _tokenize_chat(self, chat: pb.ChatMessages, text: ModelText) -> list[int]:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        opens_turn = not chat.HasField("add_generation_prompt") or chat.add_generation_prompt
        try:
            if not isinstance(text.template, ChatTemplate):
                raise text.template or ChatTemplateError("the model has no chat template")
            prompt = await text.template.render(messages, add_generation_prompt=opens_turn)
        except ChatTemplateError as error:
            raise invalid_request([Violation("chat", str(error))], Reason.CHAT_TEMPLATE_FAILED) from error
        # The template writes the special tokens itself.
        return await text.tokenizer.encode(prompt, add_special_tokens=False)

    async def attach(self, request: pb.AttachRequest, tenant: str | None) -> tuple[Generation, Seam]:
        """The output of a request whose client has lost sight of it, and where it goes on for that client;
        only of `tenant`, if that is given. Raises ServiceError."""
        seam = check_attach(request)
        claim = await self._engine.attach(request.request_id, tenant)
        generation = None
        try:
            generation = await self._open(claim)
        finally:
            if generation is None:
                claim.give_back()
        claim.follow(generation.stream)
        return generation, seam

    async def _open(self, claim: Claim) -> Generation:
        origin = claim.origin
        shown = origin.presentation
        tokenizer = None
        if shown.text:
            model = self._engine.models().get(origin.model)
            if model is None:
                raise errors.no_worker()
            tokenizer = (await self._texts.get(model)).tokenizer
        timeout_s = origin.queue_timeout_s or self._config.queue_timeout
        stream = self._new_stream(
            claim, origin.request_id, origin.n, shown, tokenizer, origin.model, timeout_s
        )
        return Generation(
            origin.request_id, origin.model, origin.prompt_tokens, shown.token_ids, tokenizer, stream
        )

    def _new_stream(
        self,
        engine: OutputEngine,
        request_id: str,
        n: int,
        presentation: Presentation,
        tokenizer: TextTokenizer | None,
        model_name: str,
        queue_timeout_s: float,
    ) -> GenerationStream:
        def queue_timeout_error() -> ServiceError:
            model = self._engine.models().get(model_name)
            connected = model is not None and model.ready_workers > 0
            return errors.queue_timeout(queue_timeout_s, worker_connected=connected)

        stops = StopStrings(presentation.stop) if presentation.stop else None
        outputs: list[OutputText | None] = [None] * n
        if tokenizer is not None:
            skip = presentation.skip_special_tokens
            outputs = [OutputText(tokenizer.detokenizer(skip_special_tokens=skip), stops) for _ in range(n)]
        return GenerationStream(
            engine,
            self._turnstile,
            request_id,
            outputs,
            presentation=presentation,
            queue_timeout_error=queue_timeout_error,
        )


def _name_in_page_token(token: str, wrong: Violations) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        wrong.note("page_token", "not a token that ListModels has given; leave it empty for the first page")
        return ""
