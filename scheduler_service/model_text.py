"""Owns the tokenizers and chat templates of the served models: made once, off the event loop, and kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler_service.served_model import ServedModel
from scheduler_service.text.chat_template import ChatTemplate, ChatTemplateError
from scheduler_service.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text in and out of one model."""

    tokenizer: TextTokenizer
    template: (
        ChatTemplate | ChatTemplateError | None
    )  # the error of one that does not compile; None: no template


class ModelTexts:
    """The ModelText of each model by name. A model that has come back with other files gets a new one."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[ServedModel, asyncio.Task[ModelText]]] = {}

    def has(self, model: ServedModel) -> bool:
        """Whether the model's text is made, or being made."""
        made = self._made.get(model.name)
        return made is not None and _same_files(made[0], model)

    async def get(self, model: ServedModel) -> ModelText:
        """The model's text. Raises TokenizerError if its tokenizer cannot be read."""
        made = self._made.get(model.name)
        if made is None or not _same_files(made[0], model):
            made = (model, asyncio.create_task(asyncio.to_thread(_make, model)))
            self._made[model.name] = made
        # Shielded: others may wait for the same one, whatever becomes of this caller.
        return await asyncio.shield(made[1])


def _make(model: ServedModel) -> ModelText:
    template: ChatTemplate | ChatTemplateError | None = None
    if model.chat_template:
        try:
            template = ChatTemplate(model.chat_template, model.special_tokens)
        except ChatTemplateError as error:
            template = error
    return ModelText(TextTokenizer(model.tokenizer_json), template)


def _same_files(one: ServedModel, other: ServedModel) -> bool:
    return (one.tokenizer_json, one.chat_template, one.special_tokens) == (
        other.tokenizer_json,
        other.chat_template,
        other.special_tokens,
    )
