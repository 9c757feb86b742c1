"""What a form of the output costs: milliseconds per step with none, half and all of the rows held to one.

    python benchmarks/structured_output.py [--rows 16] [--steps 48] [--rounds 3] [--threads 2]

The executor runs decode steps of the demo model, sampling included, as plans would make it. The mixes take
turns in every round, so that what else the machine does meets all: trust the ratios. `masks` is what the
masks alone take, on their thread while the forward runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np
import torch

from worker_service import demo_model
from worker_service.config import WorkerConfig
from worker_service.executor import Executor
from worker_service.grammars import Grammars
from worker_service.kv_memory import KvMemory
from worker_service.model import Model, load_model
from worker_service.plan import Admission, Int32, Limits, Plan, Sampling

BLOCK_SIZE = 16
PROMPT = np.arange(200, 264, dtype=np.int32)
NONE = np.empty(0, np.int32)
OBJECTS = {
    "type": "array",
    "minItems": 200,  # longer than any run
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    },
}
FORMS = {
    "schema": llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(OBJECTS), {"whitespace_pattern": "[ ]?"}
    ),
    "regex": llguidance.LLMatcher.grammar_from_regex("([a-z]{2,8} ){400}"),
}


@dataclass
class Measured:
    """Milliseconds of each step, and of its masks."""

    steps: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads}
    model = load_model(WorkerConfig(model=str(demo_model.prepare()), **options), lambda share, line: None)
    mixes = {"none": (0, "")}
    for name, grammar in FORMS.items():
        mixes |= {f"{name}, half": (args.rows // 2, grammar), f"{name}, all": (args.rows, grammar)}
    measured = {mix: Measured() for mix in mixes}
    for _ in range(args.rounds):
        for mix, (constrained, grammar) in mixes.items():
            run(model, args.rows, args.steps, constrained, grammar, measured[mix])
    report(measured, args.rows)


def run(model: Model, rows: int, steps: int, constrained: int, grammar: str, measured: Measured) -> None:
    """Prefills all rows, then decodes."""
    width = -(-(len(PROMPT) + steps + 2) // BLOCK_SIZE)
    limits = Limits(rows, rows * width + 1, BLOCK_SIZE, rows * len(PROMPT), 1024, model.vocab_size)
    kv = KvMemory(model.layers, limits.num_blocks, BLOCK_SIZE, model.kv_dtype, model.device)
    executor = Executor(model, kv, limits)
    stopwatch = Stopwatch(executor.grammars, measured)
    slots = np.arange(rows, dtype=np.int32)
    tables = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    admitted = tuple(
        admission(slot, tables[slot], grammar if slot < constrained else "") for slot in range(rows)
    )
    executor.execute(plan(1, slots, len(PROMPT), admitted))
    executor.execute(plan(2, slots, 1))  # grammars are compiled by now
    stopwatch.on = True
    for seq in range(3, steps + 3):
        started = time.perf_counter()
        result = executor.execute(plan(seq, slots, 1))
        measured.steps.append(1e3 * (time.perf_counter() - started))
        if len(result.failed_rows):
            raise RuntimeError(f"rows {result.failed_rows.tolist()} failed")


class Stopwatch:
    """Times the masks of an executor, once it is on."""

    def __init__(self, grammars: Grammars, measured: Measured) -> None:
        self.on = False
        compute = grammars._masks

        def timed(*args: object) -> object:
            started = time.perf_counter()
            masks = compute(*args)  # type: ignore[arg-type]
            if self.on:
                measured.masks.append(1e3 * (time.perf_counter() - started))
            return masks

        grammars._masks = timed  # type: ignore[method-assign, assignment]


def admission(slot: int, blocks: Int32, grammar: str) -> Admission:
    """A request of the prompt, with its own seed."""
    sampling = Sampling(temperature=1.0, seed=slot)
    return Admission(slot, f"r{slot}", PROMPT, len(PROMPT), 0, blocks, sampling, grammar=grammar)


def plan(seq: int, slots: Int32, tokens: int, admitted: tuple[Admission, ...] = ()) -> Plan:
    """All rows compute so many tokens."""
    return Plan(seq, NONE, admitted, NONE, NONE, slots, np.full(len(slots), tokens, np.int32), NONE, NONE)


def quartile(values: list[float]) -> float:
    """What a quarter of them stay below."""
    return statistics.quantiles(values, n=4)[0]


def report(measured: dict[str, Measured], rows: int) -> None:
    """A line for each mix, and the ratio to none. Quartiles, as whatever else the machine does only adds."""
    base = quartile(measured["none"].steps)
    print(f"{'rows with a form':<18}{'step ms':>9}{'ratio':>8}{'per token':>12}{'masks ms':>10}")
    for mix, times in measured.items():
        step = quartile(times.steps)
        masks = f"{quartile(times.masks):.2f}" if times.masks else "-"
        per_token = f"{1e3 * (step - base) / rows:+.0f} us"
        print(f"{mix:<18}{step:>9.2f}{step / base:>8.3f}{per_token:>12}{masks:>10}")


if __name__ == "__main__":
    main()
