"""The requests that a served model is measured with: their shapes and counts.

Owns the presets, and workloads by lengths or from a file. Knows nothing of clients or clocks.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tidegate_client.bench.errors import PlanError
from tidegate_client.bench.prompts import Prompt, PromptMaker


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens to generate."""

    prompt: Prompt
    output_tokens: int


Session: TypeAlias = list[Request]
"""Requests of one user, one after the other. Each prompt but the first follows all that was said before."""

Build: TypeAlias = Callable[[random.Random, PromptMaker], list[Session]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, and how many of them run at a time unless the user says otherwise."""

    name: str
    title: str
    concurrency: int
    build: Build


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, drawn evenly from a range with both ends."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads "128" or "100:900". Raises ValueError."""
        least, _, most = text.partition(":")
        with contextlib.suppress(ValueError):
            lengths = cls(int(least), int(most or least))
            if 1 <= lengths.least <= lengths.most:
                return lengths
        raise ValueError(f"{text!r} is no number of tokens, such as 128, and no range, such as 100:900")

    def draw(self, rng: random.Random) -> int:
        """Returns one length."""
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What random sessions look like."""

    sessions: int
    prompt: Lengths
    """Tokens of each turn's own prompt."""
    output: Lengths
    turns: int = 1
    prefix_tokens: int = 0
    """Tokens that come before the first prompt and are common to all sessions of a group."""
    prefixes: int = 1
    """Groups; sessions are dealt out to them in turn."""

    def build(self, rng: random.Random, maker: PromptMaker) -> list[Session]:
        """Draws the sessions."""
        common = [
            maker.extend(rng, None, self.prefix_tokens) if self.prefix_tokens else None
            for _ in range(self.prefixes)
        ]
        return [self._session(rng, maker, common[i % self.prefixes]) for i in range(self.sessions)]

    def _session(self, rng: random.Random, maker: PromptMaker, prefix: Prompt | None) -> Session:
        session = []
        for turn in range(self.turns):
            own = self.prompt.draw(rng)
            prompt = maker.extend(rng, prefix if turn == 0 else None, own)
            session.append(Request(prompt, self.output.draw(rng)))
        return session

    def __str__(self) -> str:
        prefix = f"{self.prefix_tokens} common + " if self.prefix_tokens else ""
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{self.sessions} x ({prefix}{self.prompt} in, {self.output} out{turns})"


def alike(count: int, prompt_tokens: int, output_tokens: int) -> Build:
    """Returns what builds so many requests of one size."""
    return Shape(count, Lengths(prompt_tokens, prompt_tokens), Lengths(output_tokens, output_tokens)).build


def _mixed(rng: random.Random, maker: PromptMaker) -> list[Session]:
    sessions = alike(24, 1000, 32)(rng, maker) + alike(24, 32, 128)(rng, maker)
    rng.shuffle(sessions)
    return sessions


PRESETS = {
    workload.name: workload
    for workload in (
        Workload("w1", "one stream: 5 x (128 in, 128 out)", 1, alike(5, 128, 128)),
        Workload("w2", "short: 64 x (64 in, 64 out)", 16, alike(64, 64, 64)),
        Workload("w3", "mixed: 24 x (1000 in, 32 out) + 24 x (32 in, 128 out)", 16, _mixed),
        Workload(
            "w4",
            "shared prefix: 48 x (802 common + 30 in, 32 out)",
            8,
            Shape(48, Lengths(30, 30), Lengths(32, 32), prefix_tokens=802).build,
        ),
    )
}


def from_shape(shape: Shape, concurrency: int) -> Workload:
    """Returns random sessions of a shape."""
    return Workload("random", str(shape), concurrency, shape.build)


def from_file(path: Path, output: Lengths, concurrency: int, most: int | None) -> Workload:
    """Reads prompts: lines of text, or for *.jsonl an object a line. Raises PlanError.

    An object has "prompt", or "turns" (a list of prompts), and perhaps "output_tokens"; without that, lengths
    are drawn from `output`.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:most]
        entries = [_entry(path, line) for line in lines]
    except OSError as error:
        raise PlanError(f"--prompt-file {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"--prompt-file {path}: prompts can't be read from it: {error!r}") from None
    if not entries:
        raise PlanError(f"{path} has no prompts")

    def build(rng: random.Random, maker: PromptMaker) -> list[Session]:
        return [[Request(p, fixed or output.draw(rng)) for p in prompts] for prompts, fixed in entries]

    return Workload(path.name, f"{len(entries)} sessions of {path.name}", concurrency, build)


def _entry(path: Path, line: str) -> tuple[list[str], int | None]:
    if path.suffix != ".jsonl":
        return [line], None
    entry = json.loads(line)
    prompts = entry["turns"] if "turns" in entry else [entry["prompt"]]
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ValueError(f"no prompt in {line[:80]!r}")
    fixed = entry.get("output_tokens")
    return prompts, None if fixed is None else int(fixed)
