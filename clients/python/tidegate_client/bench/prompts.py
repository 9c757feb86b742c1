"""Prompts of an exact number of tokens, made at random: as token ids, or as text.

Owns how they are made. Random ones share no prefix by accident. Knows nothing of clients or clocks.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tidegate_client.bench.errors import PlanError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt: TypeAlias = list[int] | str
"""Token ids, or text."""

# The first ids of a vocabulary are often special tokens.
_FIRST_ORDINARY_TOKEN = 256
# "Ġ" and "▁" are how vocabularies write the space before a word.
_WORD = re.compile("[Ġ▁][A-Za-z]{3,}")
_MAX_TRIES = 50


class PromptMaker(Protocol):
    """Makes prompts of one kind."""

    def extend(self, rng: random.Random, prefix: Prompt | None, num_tokens: int) -> Prompt:
        """Returns the prefix, if any, followed by exactly `num_tokens` random tokens more."""

    def count(self, prompt: Prompt) -> int:
        """Returns a prompt's tokens as the server will count them."""


class TokenIds:
    """Prompts as token ids: exact by construction."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = range(min(_FIRST_ORDINARY_TOKEN, vocab_size // 2), vocab_size)

    def extend(self, rng: random.Random, prefix: Prompt | None, num_tokens: int) -> list[int]:
        """Draws ordinary tokens."""
        if isinstance(prefix, str):
            raise TypeError("text can't be followed by token ids")
        return [*(prefix or ()), *rng.choices(self._ids, k=num_tokens)]

    def count(self, prompt: Prompt) -> int:
        """Counts the ids."""
        return len(prompt)


class Words:
    """Prompts as text, counted with the model's own tokenizer, special tokens such as BOS included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = sorted(
            " " + token[1:]
            for token in tokenizer.get_vocab(with_added_tokens=False)
            if _WORD.fullmatch(token)
        )
        if not self._words:
            raise PlanError("the tokenizer has no whole words to make text prompts of")

    @classmethod
    def from_file(cls, path: Path) -> Words:
        """Reads a `tokenizer.json`. Raises PlanError."""
        from tokenizers import Tokenizer  # every other command starts sooner without it

        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more specific
            raise PlanError(f"--tokenizer {path} can't be read as a tokenizer.json: {error}") from None

    def extend(self, rng: random.Random, prefix: Prompt | None, num_tokens: int) -> str:
        """Draws words until the count is right; words that merge with their neighbours make it a search."""
        if isinstance(prefix, list):
            raise TypeError("token ids can't be followed by text")
        base = prefix or ""
        wanted = num_tokens + (0 if prefix is None else self.count(base))
        words = rng.choices(self._words, k=num_tokens)
        for _ in range(_MAX_TRIES):
            text = base + "".join(words)
            excess = self.count(text) - wanted
            if excess == 0:
                return text
            if excess > 0:
                words = words[: max(0, len(words) - excess)]
            else:
                words += rng.choices(self._words, k=-excess)
        raise PlanError(f"no text of exactly {wanted} tokens was found with this tokenizer")

    def count(self, prompt: Prompt) -> int:
        """Tokenizes the text."""
        if isinstance(prompt, list):
            return len(prompt)
        return len(self._tokenizer.encode(prompt).ids)
