"""One run: sessions sent to a target under a load.

Owns the loop and the clock. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tidegate_client.bench.errors import BenchError
from tidegate_client.bench.figures import Figures, Objective, summarize
from tidegate_client.bench.load import ClosedLoop, Load
from tidegate_client.bench.passage import Passage
from tidegate_client.bench.prompts import PromptMaker
from tidegate_client.bench.target import Target
from tidegate_client.bench.workload import Session, Workload, alike

_WARM_UP_STREAMS = 4  # for an open loop

OnPassage = Callable[[Passage], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What was done, and what it showed."""

    workload: str
    title: str
    load: Load
    seed: int
    figures: Figures
    passages: list[Passage]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single requests, for JSON."""
        load = {"streams": None, "rate_per_s": None, "burstiness": None} | asdict(self.load)
        return {"workload": self.workload, "title": self.title, **load, "seed": self.seed} | asdict(
            self.figures
        )


async def run(
    target: Target,
    workload: Workload,
    load: Load,
    seed: int,
    maker: PromptMaker,
    *,
    warm_up: bool = True,
    objective: Objective | None = None,
    on_start: Callable[[int], None] = lambda num_requests: None,
    on_passage: OnPassage = lambda passage: None,
) -> Run:
    """Sends a workload once, after a warm-up with other prompts. Raises BenchError if all of it failed."""
    rng = random.Random(f"{workload.name}/{load}/{seed}")
    streams = load.streams if isinstance(load, ClosedLoop) else _WARM_UP_STREAMS
    if warm_up:
        await _closed_loop(target, alike(streams, 64, 8)(rng, maker), streams, lambda passage: None)
    sessions = workload.build(rng, maker)
    on_start(sum(map(len, sessions)))
    started_s = time.perf_counter()
    if isinstance(load, ClosedLoop):
        passages = await _closed_loop(target, sessions, load.streams, on_passage)
    else:
        passages = await _open_loop(target, sessions, load.arrivals_s(rng, len(sessions)), on_passage)
    failed = [passage for passage in passages if passage.error]
    if len(failed) == len(passages):
        raise BenchError(
            f"no request was answered; the first failed with {failed[0].error}: {failed[0].message}"
        )
    return Run(workload.name, workload.title, load, seed, summarize(passages, started_s, objective), passages)


async def _closed_loop(
    target: Target, sessions: list[Session], streams: int, on_passage: OnPassage
) -> list[Passage]:
    waiting = iter(sessions)
    done: list[Passage] = []

    async def stream() -> None:
        for session in waiting:  # shared by all streams
            await _talk(target, session, time.perf_counter(), done, on_passage)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return done


async def _open_loop(
    target: Target, sessions: list[Session], arrivals_s: list[float], on_passage: OnPassage
) -> list[Passage]:
    begun_s = time.perf_counter()
    done: list[Passage] = []

    async def start(session: Session, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        await _talk(target, session, due_s, done, on_passage)

    pairs = zip(sessions, arrivals_s, strict=True)
    await asyncio.gather(*(start(session, begun_s + arrival_s) for session, arrival_s in pairs))
    return done


async def _talk(
    target: Target, session: Session, due_s: float, done: list[Passage], on_passage: OnPassage
) -> None:
    """Sends a session's requests, each after the last one's end; a failure ends it."""
    said: Any = type(session[0].prompt)()  # of the prompts' kind
    for request in session:
        prompt = said + request.prompt
        answer = await target.send(prompt, request.output_tokens, due_s)
        done.append(answer.passage)
        on_passage(answer.passage)
        if answer.passage.error:
            return
        said = prompt + answer.output
        due_s = time.perf_counter()
