"""Owns what the service knows of a model that workers serve. No model files are needed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its workers describe it. It stays known, with no ready workers, while they are away."""

    name: str
    fingerprint: str  # equal ones may share requests
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_json: bytes = b""  # contents of tokenizer.json; empty: token ids only
    chat_template: str = ""  # Jinja; empty: none
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by role, such as "bos_token"
    structured_output: bool = False  # whether its workers hold outputs to grammars
    ready_workers: int = 0
