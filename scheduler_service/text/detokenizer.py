"""Owns incremental detokenization: token ids in, the text that is certain out.

The pieces of any split of a token sequence join to exactly what decoding the whole sequence gives, and the
cost of a token does not grow with the output. It knows decoders of the `tokenizers` library, not requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Protocol

# A run of byte tokens longer than this is not looked into before it ends, so that a look costs little.
_MAX_PENDING_BYTES = 64
# Tokens that decode to nothing cannot serve as context; so many of them are kept at most.
_MAX_ANCHOR_TOKENS = 16


class Detokenizer(Protocol):
    """Text of one growing sequence of tokens."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that has become certain with these further tokens."""
        ...

    def pending(self) -> str:
        """Whole characters that `flush` would give now, but that a further token might still change."""
        ...

    def flush(self) -> str:
        """The rest of the text; what stays incomplete shows as U+FFFD. Nothing may be fed afterwards."""
        ...


class BytePieces(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, looked up once for each id."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped: Container[int]) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        self[token_id] = piece = b"" if token is None else _token_bytes(token)
        return piece


class KeptTokens(dict[int, bool]):
    """Whether each token goes into the text: not those that are skipped, nor ids that have no token."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped: Container[int]) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bool:
        self[token_id] = kept = token_id not in self._skipped and self._id_to_token(token_id) is not None
        return kept


class TextsAlone(dict[int, str]):
    """The text of each token when it is decoded alone, looked up once for each id."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self._decode([token_id])
        return text


class ByteLevelDetokenizer:
    """For byte-level BPE: tokens are byte strings, and only characters cut in two have to wait."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"".join(map(self._pieces.__getitem__, token_ids)))

    def pending(self) -> str:
        """Always empty: a whole character is certain at once."""
        return ""

    def flush(self) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes new tokens behind the one before them, whose text is then cut off.

    The token in front keeps rules for the beginning of a text, such as dropping its first space, from
    applying again. Byte tokens (`<0xE4>`) wait for the end of their run: decoders judge a run as a whole, so
    that one bad byte turns even its good characters into U+FFFD.
    """

    __slots__ = ("_alone", "_anchor", "_anchor_text", "_byte_values", "_decode", "_held", "_kept")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        alone: TextsAlone,
        kept: KeptTokens,
        byte_values: Mapping[int, int],
    ) -> None:
        self._decode = decode
        self._alone = alone
        self._kept = kept
        self._byte_values = byte_values
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._held: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        held = self._held
        end = 0
        for token_id in token_ids:
            if self._kept[token_id]:
                held.append(token_id)
                if token_id not in self._byte_values:
                    end = len(held)
        if end == 0:
            return ""
        window = self._anchor + held[:end]
        text = self._decode(window)[len(self._anchor_text) :]
        del held[:end]
        self._anchor = window[-1:]
        self._anchor_text = self._alone[window[-1]]
        if not self._anchor_text:
            self._anchor = window[-_MAX_ANCHOR_TOKENS:]
            self._anchor_text = self._decode(self._anchor)
        return text

    def pending(self) -> str:
        """See Detokenizer."""
        if not 0 < len(self._held) <= _MAX_PENDING_BYTES:
            return ""
        try:
            bytes(map(self._byte_values.__getitem__, self._held)).decode()
        except UnicodeDecodeError:
            return ""
        return self._decode(self._anchor + self._held)[len(self._anchor_text) :]

    def flush(self) -> str:
        """See Detokenizer."""
        if not self._held:
            return ""
        text = self._decode(self._anchor + self._held)[len(self._anchor_text) :]
        self._held.clear()
        return text


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level vocabularies spell the 256 bytes (as GPT-2 chose them)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token's bytes. One with a character outside the alphabet (an added token) stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return token.encode()
