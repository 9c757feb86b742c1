"""Reads what a scheduler needs to tokenize: tokenizer.json as it is, chat template and special tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_service.errors import UnsupportedModelError

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's tokenizer. Empty: the model has none, and takes token ids only."""

    tokenizer_json: bytes = b""
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


def read_tokenizer(folder: Path, gguf_file: str | None) -> TokenizerFiles:
    """The tokenizer of a model folder, or of a GGUF file in it, which transformers converts.

    Raises UnsupportedModelError for files that can't be used, OSError for those that can't be read.
    """
    if gguf_file is None and (folder / "tokenizer.json").is_file():
        return _read_folder(folder)
    known = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
    if gguf_file is None and not any((folder / name).is_file() for name in known):
        return TokenizerFiles()
    from transformers import AutoTokenizer  # seconds to import, and few need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
        )
        tokenizer_json = tokenizer.backend_tokenizer.to_str().encode()
    except OSError:
        raise
    except Exception as error:  # each tokenizer has its own, and one without a tokenizer.json AttributeError
        told = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"its tokenizer can't be converted to a tokenizer.json: {type(error).__name__}: {told}"
        ) from error
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=_default_template(tokenizer.chat_template),
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items() if k in _ROLES},
    )


def check_tokenizer(tokenizer_json: bytes) -> None:
    """Raises UnsupportedModelError for what schedulers can't read. Takes a tenth of a second and more."""
    import tokenizers  # here, since this is asked of doubtful ones only

    try:
        tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises plain Exception or ValueError
        raise UnsupportedModelError(
            f"its tokenizer.json ({len(tokenizer_json):,} bytes) can't be read: {error}. Fetch it again"
        ) from error


def _read_folder(folder: Path) -> TokenizerFiles:
    settings = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    template = folder / "chat_template.jinja"
    return TokenizerFiles(
        tokenizer_json=(folder / "tokenizer.json").read_bytes(),
        chat_template=(
            _read_text(template) if template.is_file() else _default_template(settings.get("chat_template"))
        ),
        special_tokens={role: _token(settings, role) for role in _ROLES if settings.get(role)},
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UnsupportedModelError(f"its {path.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"its {path.name} is a JSON {type(content).__name__}, not an object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModelError(f"its {path.name} is not UTF-8: {error}") from error


def _token(settings: dict[str, Any], role: str) -> str:
    """A special token is text, or an object that has it."""
    token = settings[role]
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise UnsupportedModelError(
            f"its tokenizer_config.json or special_tokens_map.json has no text for {role}, but {token!r}"
        )
    return text


def _default_template(template: str | dict[str, str] | list[dict[str, str]] | None) -> str:
    """A model may have several named templates, in either of two forms."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        return template.get("default", "")
    return template or ""
