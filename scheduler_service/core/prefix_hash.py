"""Owns the names of prefixes: chained, keyed block hashes. Knows nothing of blocks or requests.

The hash of a block names all tokens up to its end. It is keyed and cryptographic since whether a prefix is
cached shows in response times, and another tenant must not be able to forge or guess one.
"""

from __future__ import annotations

from hashlib import blake2b

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4


class PrefixHasher:
    """Hashes blocks of int32 tokens under one secret key."""

    def __init__(self, key: bytes) -> None:
        self._roots = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"root")
        self._blocks = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"block")

    def root(self, model: str, adapter: str, cache_salt: str) -> bytes:
        """Parent of a first block. Lengths go in too, so that no two triples give the same bytes."""
        h = self._roots.copy()
        for part in (model, adapter, cache_salt):
            encoded = part.encode()
            h.update(len(encoded).to_bytes(4, "little"))
            h.update(encoded)
        return h.digest()

    def extend(self, parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
        """Hashes of the full blocks in `tokens` (int32, native order), the first one following `parent`."""
        step = block_size * _TOKEN_BYTES
        hashes = []
        blank = self._blocks
        for start in range(0, len(tokens) - step + 1, step):
            h = blank.copy()
            h.update(parent + tokens[start : start + step])
            parent = h.digest()
            hashes.append(parent)
        return hashes
