"""Owns one model's tokenizer, made from the bytes of its tokenizer.json."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence

import tokenizers

from scheduler_service.text.detokenizer import (
    ByteLevelDetokenizer,
    BytePieces,
    Detokenizer,
    KeptTokens,
    TextsAlone,
    WindowDetokenizer,
)

# Work on more than this leaves the event loop for a thread; less takes a millisecond or two.
_MAX_INLINE_CHARACTERS = 2048
_MAX_INLINE_TOKENS = 4096

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerError(Exception):
    """The bytes are not a tokenizer.json that the `tokenizers` library reads."""


class TextTokenizer:
    """Converts text to token ids and back. Safe to use from several threads.

    Building one parses megabytes: do it in a thread.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception or ValueError
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        # A saved tokenizer can carry settings of its training: prompts are neither cut nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_tokens.values())
        kinds = _decoder_kinds(self._tokenizer)
        self._byte_values = self._find_byte_values() if "ByteFallback" in kinds else {}
        # By skip_special_tokens.
        skipped: dict[bool, frozenset[int]] = {False: frozenset(), True: self._special_ids}
        id_to_token = self._tokenizer.id_to_token
        self._kept = {skip: KeptTokens(id_to_token, ids) for skip, ids in skipped.items()}
        self._pieces: dict[bool, BytePieces] | None = None
        if kinds == ["ByteLevel"]:
            self._pieces = {skip: BytePieces(id_to_token, ids) for skip, ids in skipped.items()}
        # Stands in front of a token whose text alone is asked for.
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._decode_all(self._anchor)
        self._token_texts: dict[int, str] = {}
        self._alone = TextsAlone(self._decode_all)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a token, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._special_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their text."""
        return self._special_tokens

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._tokenizer.token_to_id(token)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens such as a leading BOS are added if asked for."""
        if len(text) > _MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all of `token_ids`. Ids without a token give nothing."""
        if len(token_ids) > _MAX_INLINE_TOKENS:
            return await asyncio.to_thread(self._tokenizer.decode, token_ids, skip_special_tokens)
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text; incomplete characters show as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._decode_all([*self._anchor, token_id])[len(self._anchor_text) :]
            self._token_texts[token_id] = text
        return text

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new incremental detokenizer."""
        if self._pieces is not None:
            return ByteLevelDetokenizer(self._pieces[skip_special_tokens])
        kept = self._kept[skip_special_tokens]
        return WindowDetokenizer(self._decode_all, self._alone, kept, self._byte_values)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _find_byte_values(self) -> dict[int, int]:
        """Byte value of each byte token."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        matches = ((token_id, _BYTE_TOKEN.fullmatch(token)) for token, token_id in vocabulary.items())
        return {token_id: int(match[1], 16) for token_id, match in matches if match}


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's steps; [] where it has none."""
    if tokenizer.decoder is None:
        return []
    # The pickled form is the decoder's own JSON: far less to parse than the whole tokenizer.
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]
