"""Where requests go, and what prompts it takes: a scheduler, or a server with OpenAI's API."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tidegate_client.aio import AsyncClient
from tidegate_client.bench.errors import PlanError
from tidegate_client.bench.grpc_target import GrpcTarget
from tidegate_client.bench.prompts import PromptMaker, TokenIds, Words
from tidegate_client.bench.target import Target

API_KEY_VARIABLE = "OPENAI_API_KEY"
_NO_VOCABULARY = 2  # for prompts of a file, where none are made


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how it is spoken to."""

    address: str
    """host:port of a scheduler."""
    model: str = ""
    """Empty: the only one that is served."""
    openai: str | None = None
    """URL of an OpenAI endpoint, in place of the scheduler."""
    chat: bool = False
    tokenizer: Path | None = None
    """Of the OpenAI endpoint's model: prompts are text."""
    vocab_size: int | None = None
    """The same, without a tokenizer: prompts are token ids."""
    ignore_eos: bool = True

    def check(self, *, turns: int, prompts_given: bool) -> None:
        """Raises PlanError if such prompts can't be sent there."""
        if self.openai is None:
            if self.chat or self.tokenizer or self.vocab_size:
                raise PlanError("--chat, --tokenizer and --vocab-size go with --openai URL")
        elif not prompts_given and not self.makes_prompts():
            raise PlanError(
                "prompts of exact length need --tokenizer FILE of the endpoint's model, or its --vocab-size"
            )
        elif not prompts_given and self.tokenizer is None and (self.chat or turns > 1):
            raise PlanError("token ids are no chat and no --turns; give --tokenizer FILE")

    def makes_prompts(self) -> bool:
        """Whether prompts of exact length can be made; otherwise they must be given."""
        return self.openai is None or self.tokenizer is not None or self.vocab_size is not None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Target, PromptMaker]]:
        """Connects, and tells what prompts to send. Raises BenchError, TidegateError."""
        if self.openai is None:
            async with AsyncClient(self.address, retry=None) as client:
                name, vocab_size = await self._served_model(client)
                yield GrpcTarget(client, name, ignore_eos=self.ignore_eos), TokenIds(vocab_size)
            return
        maker = (
            Words.from_file(self.tokenizer) if self.tokenizer else TokenIds(self.vocab_size or _NO_VOCABULARY)
        )
        async with _openai_target(self, self.openai) as target:
            yield target, maker

    async def _served_model(self, client: AsyncClient) -> tuple[str, int]:
        models = await client.list_models()
        chosen = [model for model in models if self.model in ("", model.name)]
        if len(chosen) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise PlanError(f"{self.address} serves {names}; name one of them with --model")
        return chosen[0].name, chosen[0].vocab_size


@contextlib.asynccontextmanager
async def _openai_target(endpoint: Endpoint, url: str) -> AsyncIterator[Target]:
    try:
        from tidegate_client.bench.openai_target import OpenAITarget  # an extra
    except ImportError:
        raise PlanError(
            "OpenAI endpoints need httpx: in a clone of Tidegate, pip install '.[bench]'"
        ) from None
    target = OpenAITarget(
        url,
        endpoint.model,
        chat=endpoint.chat,
        ignore_eos=endpoint.ignore_eos,
        api_key=os.environ.get(API_KEY_VARIABLE),
    )
    try:
        await target.find_model()
        yield target
    finally:
        await target.close()
