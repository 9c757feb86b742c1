"""Owns the process that compiles output forms, to learn whether that can be done at all.

A form comes from a client and may need endless time or memory, or find a bug: here that costs one process,
not the service. It ends itself when a form takes too much computing, and when its input ends. No gRPC here.

`python -m scheduler_service.grammar_process`, which GrammarCompiler starts.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import IO, Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_COMPUTING_S = 0.5
# What goes to workers each time that a candidate is admitted: all slots' together fit into a plan's message.
MAX_GRAMMAR_BYTES = 131_072
MAX_LEXER_STATES = 50_000  # as in the workers
MAX_MESSAGE_CHARACTERS = 400
_MAX_MEMORY_BYTES = 2 << 30
_LENGTH = struct.Struct("<I")

# Models go on with blanks for ever where they may. A schema may ask for others in `x-guidance`.
_JSON_DEFAULTS: Any = {"whitespace_pattern": "[ ]?"}
_JSON_OVERRIDES: Any = {"lenient": False, "coerce_one_of": False}  # what can't be enforced is refused


class FormError(Exception):
    """A form can't be compiled. The text is for its author."""


class _Bytes:
    """A tokenizer of the model's special tokens, at their own ids, and one token for each byte.

    Whether a form can be compiled does not depend on the other tokens, and they take a second to read.
    """

    bos_token_id = None

    def __init__(self, vocab_size: int, special_tokens: dict[str, int], eos_token_ids: list[int]) -> None:
        special = {token_id: text.encode() for text, token_id in special_tokens.items()}
        free = (token_id for token_id in range(vocab_size + 256) if token_id not in special)
        self._byte_ids = [next(free) for _ in range(256)]
        width = max([vocab_size, self._byte_ids[-1] + 1, *(token_id + 1 for token_id in special)])
        self.tokens = [b""] * width
        for byte, token_id in enumerate(self._byte_ids):
            self.tokens[token_id] = bytes([byte])
        for token_id, text in special.items():
            self.tokens[token_id] = text
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._byte_ids[byte] for byte in data]


@lru_cache(maxsize=8)
def read_vocabulary(description: str) -> llguidance.LLTokenizer:
    """The tokenizer for a JSON list of vocabulary size, special tokens by text, and end-of-text ids."""
    vocab_size, special_tokens, eos_token_ids = json.loads(description)
    tokenizer = llguidance.TokenizerWrapper(_Bytes(vocab_size, special_tokens, eos_token_ids))
    return llguidance.LLTokenizer(tokenizer, eos_token=eos_token_ids, slices=[])


def compile_form(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """The grammar of a form, as workers take it. Raises FormError."""
    try:
        grammar = _to_grammar(kind, text)
    except Exception as error:  # the converters raise all sorts
        raise FormError(_first_words(str(error))) from None
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        size = len(grammar.encode())
        raise FormError(f"the form makes a grammar of {size:,} bytes; allowed: at most {MAX_GRAMMAR_BYTES:,}")
    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    while not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
        matcher.consume_tokens(forced)  # as far as there is one way, whose first fork may be too wide
        matcher.compute_bitmask()
        if matcher.is_stopped():
            break
    if matcher.is_error():
        raise FormError(_first_words(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise FormError(_first_words("; ".join(warnings)))
    return grammar


def _to_grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        if not isinstance(json.loads(text), dict):
            raise FormError('the schema is no JSON object; for any JSON object it is {"type": "object"}')
        return llguidance.LLMatcher.grammar_from_json_schema(text, _JSON_DEFAULTS, _JSON_OVERRIDES)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        values = json.loads(text)
        text = "start: " + " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    elif kind == "ebnf":
        text = gbnf_to_lark(text)
    elif text.lstrip().startswith("{"):
        raise FormError("a Lark grammar is a list of rules, and does not begin with a brace")
    return llguidance.LLMatcher.grammar_from_lark(text)


def _first_words(message: str) -> str:
    text = message.removesuffix("<non-verbose/>").strip()
    if text.startswith(("NoExtension", "NoExtensionBias")):
        return "no text at all matches it"
    if text.startswith("Unimplemented keys"):
        text += "; leave these keys of the schema out, or say the same by others"
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."


def read_frame(stream: IO[bytes]) -> Any | None:
    """The next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def write_frame(stream: IO[bytes], message: Any) -> None:
    """Sends a message of JSON's types. Raises OSError where nobody reads."""
    body = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    """Answers each form on the input with its grammar, or with what is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (message := read_frame(sys.stdin.buffer)) is not None:
        kind, text, vocabulary = message
        tokenizer = read_vocabulary(vocabulary)
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPUTING_S)  # its signal ends the process
        try:
            answer = [compile_form(kind, text, tokenizer), ""]
        except FormError as error:
            answer = ["", str(error)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
