"""What the caller calls the fields that a refusal of the scheduler is about.

Owns the names of Tidegate's fields in OpenAI's terms, some of which depend on what the request has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PARAMETERS = {"chat": "messages", "text": "prompt", "token_ids": "prompt"}
_GROUPS = ("sampling.", "stopping.", "output.")
FORM = "structured_output"
"""Tidegate's field for the form of an output."""


class FieldNames:
    """The names of fields for one caller."""

    def __init__(self, own: Mapping[str, str] | None = None) -> None:
        """own: names that only this request has, by Tidegate's; each holds for all within the field."""
        self._names = _PARAMETERS | dict(own or {})

    def name_of(self, field: str) -> str:
        """The caller's name, such as "top_p" for "sampling.top_p"."""
        for group in _GROUPS:
            field = field.removeprefix(group)
        outer = field
        while outer:
            if outer in self._names:
                return self._names[outer]
            outer = outer.rpartition(".")[0]
        return field

    def message(self, text: str, fields: Iterable[str]) -> str:
        """A refusal's text, with the caller's names of the fields that it is about."""
        for field in fields:
            text = re.sub(rf"(^|; ){re.escape(field)}:", rf"\g<1>{self.name_of(field)}:", text)
        return re.sub(rf"\b{FORM}\b", lambda _: self.name_of(FORM), text)
