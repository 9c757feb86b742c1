"""What is measured: something that answers one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate_client.bench.passage import Passage
from tidegate_client.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request went, and what was generated, in the kind that its prompt had."""

    passage: Passage
    output: Prompt


class Target(Protocol):
    """A server, through one of its protocols. Fit for any number of requests at a time in one event loop."""

    async def send(self, prompt: Prompt, output_tokens: int, due_s: float) -> Answer:
        """Sends a request that was due then. A failed one is a passage, too; nothing is tried again."""
