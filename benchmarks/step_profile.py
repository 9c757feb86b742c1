"""Where a worker's step spends its time: as a table, and as a trace for ui.perfetto.dev or chrome://tracing.

    python benchmarks/step_profile.py [--dtype bfloat16] [--quantization int8] [--decoder generic] [--steps 9]

Plans go through what the worker does with them, from the wire's bytes to those of the result: decode the
plan, prepare the batch, the forward, sampling, encode the answer. The fused decoder's forward is told by its
stages, which are summed over layers; that of transformers' modules by torch's profiler, with a trace of its
own for each case. Figures are means of milliseconds over steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service import demo_model
from worker_service.attention import AttentionStep
from worker_service.config import WorkerConfig
from worker_service.executor import Executor
from worker_service.forward import Forward, FusedForward
from worker_service.kv_memory import KvMemory
from worker_service.model import Model, load_model
from worker_service.plan import Limits
from worker_service.plan_codec import decode_plan, encode_result

PHASES = ("decode plan", "prepare", "forward", "sampling", "encode answer")
OPERATORS_SHOWN = 10


@dataclass(frozen=True)
class Case:
    """Rows that decode after `context` tokens, and a prompt of `prompt` tokens, computed beside them.

    The first `shared` tokens, whole blocks, are in the cache for all.
    """

    rows: int
    context: int
    prompt: int = 0
    shared: int = 0

    def __str__(self) -> str:
        decodes = f"decode, {self.rows} rows of {self.context}" if self.rows else ""
        prompt = f"prefill of {self.prompt}" if self.prompt else ""
        shared = f", {self.shared} shared" if self.shared else ""
        return " + ".join(part for part in (decodes, prompt) if part) + shared

    def tokens(self, steps: int) -> int:
        """Most tokens of a row."""
        return max(self.context + steps, self.prompt)


CASES = (
    Case(1, 500),
    Case(16, 500),
    Case(0, 0, 1000),
    Case(15, 500, 256),
    Case(8, 848, shared=800),
    Case(7, 848, 832, shared=800),
)


@dataclass
class Measured:
    """A case's steps: when each began and how long its phases were, in ns; what its forward was made of."""

    case: Case
    starts_ns: list[int] = field(default_factory=list)
    phases_ns: list[tuple[int, ...]] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)  # shares of the forward

    def mean_ms(self, phase: int) -> float:
        """Of a phase."""
        return statistics.fmean(phases[phase] for phases in self.phases_ns) / 1e6

    def mean_parts_ms(self) -> dict[str, float]:
        """Of each part of the forward, the largest first."""
        forward = self.mean_ms(PHASES.index("forward"))
        names = self.parts[0] if self.parts else {}
        means = {name: forward * statistics.fmean(p[name] for p in self.parts) for name in names}
        return dict(sorted(means.items(), key=lambda item: -item[1]))


def int32(values: Any) -> bytes:
    """A column of the wire."""
    return np.asarray(values, "<i4").tobytes()


def make_plans(case: Case, steps: int, limits: Limits, temperature: float) -> Iterator[bytes]:
    """Plans as the scheduler sends them. A prompt is one step; the next plan releases it and has another."""
    rng = np.random.default_rng(0)
    width = -(-case.tokens(steps) // limits.block_size)
    blocks = (1 + rng.permutation(limits.num_blocks - 1)[: (case.rows + 1) * width]).reshape(-1, width)
    blocks[:, : case.shared // limits.block_size] = blocks[0, : case.shared // limits.block_size]
    sampling = pb.WorkerSampling(temperature=temperature, top_p=1, repetition_penalty=1, logprobs=-1)

    def admit(slot: int, tokens: int, computed: int) -> pb.AdmittedRequest:
        return pb.AdmittedRequest(
            slot=slot,
            request_id=str(slot),
            token_ids=int32(rng.integers(0, limits.vocab_size, tokens)),
            num_prompt_tokens=tokens,
            num_computed_tokens=computed,
            block_ids=int32(blocks[slot]),
            sampling=sampling,
        )

    for step in range(steps):
        admitted = [] if step else [admit(slot, case.context, case.context - 1) for slot in range(case.rows)]
        released = []
        if case.prompt:
            admitted.append(admit(case.rows, case.prompt, case.shared))
            released = [case.rows] if step else []
        yield pb.StepPlan(
            seq=step,
            released=int32(released),
            admitted=admitted,
            slots=int32(range(case.rows + bool(case.prompt))),
            num_tokens=int32([1] * case.rows + [case.prompt - case.shared] * bool(case.prompt)),
        ).SerializeToString()


def make_executor(model: Model, kv: KvMemory, num_slots: int) -> Executor:
    """One whose memory has been written: what never was is one page, read again and again."""
    limits = Limits(
        num_slots=num_slots,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_batched_tokens=2048,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )
    return Executor(model, kv, limits)


def run_step(executor: Executor, wire: bytes, measured: Measured) -> None:
    """Executes a plan and notes what it took."""
    started = time.monotonic_ns()
    plan = decode_plan(pb.StepPlan.FromString(wire), executor.limits)
    decoded = time.monotonic_ns()
    result = executor.execute(plan)
    executed = time.monotonic_ns()
    encode_result(result).SerializeToString()
    encoded = time.monotonic_ns()
    t = result.timings
    measured.starts_ns.append(started)
    measured.phases_ns.append(
        (
            decoded - started,
            t.forward_ns - decoded,
            t.sampling_ns - t.forward_ns,
            executed - t.sampling_ns,
            encoded - executed,
        )
    )


def measure(executor: Executor, case: Case, steps: int, temperature: float) -> Measured:
    """Runs a case; the first two steps, which admit and warm up, are left out."""
    executor.reset()
    measured = Measured(case)
    forward = executor.model.forward
    for step, wire in enumerate(make_plans(case, steps + 2, executor.limits, temperature)):
        run_step(executor, wire, measured if step >= 2 else Measured(case))
        if step >= 2 and isinstance(forward, FusedForward):
            measured.parts.append(forward.profile())
    return measured


def profile_operators(executor: Executor, case: Case, temperature: float, trace: Path) -> dict[str, float]:
    """Shares of a forward's time by torch's operators, from three steps; their trace goes to a file."""
    executor.reset()
    plans = list(make_plans(case, 5, executor.limits, temperature))
    for wire in plans[:2]:
        run_step(executor, wire, Measured(case))
    cuda = executor.overlaps
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as profiler:
        for wire in plans[2:]:
            run_step(executor, wire, Measured(case))
    profiler.export_chrome_trace(str(trace))
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if event.key not in ("forward", "sampling"):
            times[event.key] = times.get(event.key, 0.0) + spent
    total = sum(times.values())
    shares = {name: spent / total for name, spent in times.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:OPERATORS_SHOWN]
    return {name: shares[name] for name in largest} | {
        "all else": 1 - sum(shares[name] for name in largest),
    }


class NamedForward:
    """A forward that torch's profiler shows under its name."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, step: AttentionStep, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """See Forward."""
        with torch.profiler.record_function("forward"):
            return self._forward(step, token_ids, positions, keep)


def trace_events(measured: Measured, process: int) -> Iterator[dict[str, Any]]:
    """The case as a process of a Chrome trace: spans of steps, phases and the forward's parts."""
    common = {"pid": process, "tid": 0}
    yield {"ph": "M", "name": "process_name", "args": {"name": str(measured.case)}, **common}

    def span(name: str, start_ns: float, duration_ns: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "ts": start_ns / 1e3, "dur": duration_ns / 1e3, **common}

    for index, (start, phases) in enumerate(zip(measured.starts_ns, measured.phases_ns, strict=True)):
        yield span("step", start, sum(phases))
        at = float(start)
        for name, duration in zip(PHASES, phases, strict=True):
            yield span(name, at, duration)
            if name == "forward" and measured.parts:
                inner = at
                for part, share in measured.parts[index].items():
                    yield span(part, inner, share * duration)
                    inner += share * duration
            at += duration


def print_tables(results: list[Measured]) -> None:
    """Phases of every case, then the parts of their forwards."""
    print("| step | ms | " + " | ".join(PHASES) + " |")
    print("|---" * (2 + len(PHASES)) + "|")
    for measured in results:
        times = [measured.mean_ms(phase) for phase in range(len(PHASES))]
        cells = [f"{ms:.2f} ({ms / sum(times):.1%})" for ms in times]
        print(f"| {measured.case} | {sum(times):.2f} | " + " | ".join(cells) + " |")
    print("\n| part of the forward | " + " | ".join(str(m.case) for m in results) + " |")
    print("|---" * (1 + len(results)) + "|")
    parts = [measured.mean_parts_ms() for measured in results]
    for name in dict.fromkeys(name for part in parts for name in part):
        cells = []
        for part in parts:
            cells.append(f"{part[name]:.2f} ({part[name] / sum(part.values()):.1%})" if name in part else "-")
        print(f"| {name} | " + " | ".join(cells) + " |")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, a GGUF file or a hub id (default: the demo model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--decoder", default="auto", choices=("auto", "fused", "generic"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cases", default="", help="only cases whose name contains this, such as decode")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--output", type=Path, default=Path("build/profile"), help="folder of the traces")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    names = ("dtype", "device", "decoder", "quantization", "block_size")
    settings = {"model": options.model or str(demo_model.prepare())}
    settings |= {name: getattr(options, name) for name in names}
    model = load_model(WorkerConfig.model_validate(settings), lambda share, text: None)
    if model.decoder_name != "fused":
        model = dataclasses.replace(model, forward=NamedForward(model.forward))
    longest = [-(-case.tokens(options.steps + 2) // options.block_size) for case in CASES]
    blocks = 1 + max((case.rows + 1) * width for case, width in zip(CASES, longest, strict=True))
    kv = KvMemory(model.layers, blocks, options.block_size, model.kv_dtype, model.device)
    for cache in (*kv.keys, *kv.values):
        cache.normal_()
    executor = make_executor(model, kv, max(case.rows for case in CASES) + 1)
    options.output.mkdir(parents=True, exist_ok=True)
    results = []
    for case in (case for case in CASES if options.cases in str(case)):
        measured = measure(executor, case, options.steps, options.temperature)
        if model.decoder_name != "fused":
            name = str(case).replace(",", "").replace(" + ", "-").replace(" ", "-")
            trace = options.output / f"operators-{name}.json"
            measured.parts = [profile_operators(executor, case, options.temperature, trace)]
        results.append(measured)
    print(
        f"{model.name}, {model.decoder_name} decoder, {model.dtype}, quantization {options.quantization}, "
        f"{options.threads} threads: means of {options.steps} steps, ms and share\n"
    )
    print_tables(results)
    events = [event for index, measured in enumerate(results) for event in trace_events(measured, index)]
    path = options.output / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    print(f"\ntraces are in {options.output}; open {path} at https://ui.perfetto.dev")


if __name__ == "__main__":
    main(sys.argv[1:])
