"""Owns the values that say how a client wants a request's output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presentation:
    """What of the output is sent, and which text ends it. The core knows nothing of these."""

    text: bool = False
    token_ids: bool = True
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
