"""Log-probabilities in the two shapes that OpenAI has for them.

Owns those shapes. Called only where log-probabilities were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidegate_client import TokenLogprob, TokenLogprobs


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The shape of chats: an entry for each token, with the likeliest ones in it."""
    return {
        "content": [
            _chat_token(position.sampled) | {"top_logprobs": [_chat_token(t) for t in position.top[:num_top]]}
            for position in positions
        ],
        "refusal": None,
    }


def completion_logprobs(positions: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """The shape of completions: columns. offset: characters of the choice's text before the first token."""
    tokens = [position.sampled.text for position in positions]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [position.sampled.logprob for position in positions],
        # The sampled token is always among them, as OpenAI has it.
        "top_logprobs": [
            {each.text: each.logprob for each in (*position.top, position.sampled)} for position in positions
        ],
        "text_offset": offsets,
    }


def num_characters(positions: Sequence[TokenLogprobs]) -> int:
    """How far tokens move the offset of the next one."""
    return sum(len(position.sampled.text) for position in positions)


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    # A token that is a part of a character has no text of its own, and its bytes are not known here.
    is_text = "\N{REPLACEMENT CHARACTER}" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if is_text else None,
    }
