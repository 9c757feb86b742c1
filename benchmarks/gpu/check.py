"""All that is claimed of the GPU path, checked and measured by one command, in minutes on one GPU.

    python -m benchmarks.gpu.check [--parts correctness,bandwidth,generation] [--json figures.json]
    python -m benchmarks.gpu.check --dry-run      # tiny shapes on a CPU, under Triton's interpreter

- correctness: every kernel against its reference, attention at the sizes and in the types of real models, and
  decodes replayed from CUDA graphs against the same without.
- bandwidth: decode attention as a share of what a copy moves. The goal is 90 %.
- generation: output tokens a second on random-weight 1B and 8B Llama shapes, with CUDA graphs and without,
  against transformers' continuous batching; the share of a decode step in which the GPU does nothing, and the
  gap between steps.

Exits with 1 where a kernel is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads as it is imported

import torch

PARTS = ("correctness", "bandwidth", "generation")


def check_correctness(device: torch.device, dry_run: bool) -> tuple[bool, list[dict[str, Any]]]:
    """Whether all is right, and each comparison."""
    from benchmarks.gpu import correctness, graphs

    good = correctness.run_tests(dry_run)
    print(f"the kernels' tests: {'passed' if good else 'FAILED'}", flush=True)
    rows = []
    checks = (correctness.check_attention, graphs.check_graphs)
    for check in itertools.chain.from_iterable(run(device, dry_run) for run in checks):
        good = good and check.good
        verdict = "right" if check.good else "WRONG"
        print(f"{verdict}  error {check.error:.1e} of at most {check.most:.0e}  {check.name}", flush=True)
        rows.append({"name": check.name, "error": check.error, "most": check.most, "right": check.good})
    return good, rows


def measure_bandwidth(device: torch.device, dry_run: bool) -> list[dict[str, Any]]:
    """The share of each case."""
    from benchmarks.gpu import bandwidth

    peak = bandwidth.copy_bytes_per_s(device, 1 << 20 if dry_run else 1 << 31)
    print(f"a copy moves {peak / 1e9:.0f} GB/s\n")
    print(f"| rows | context | us | GB/s | share of a copy's |\n{'|---' * 5}|")
    rows = []
    for one in bandwidth.measure_decodes(device, dry_run):
        share = one.bytes_per_s / peak
        cells = (one.rows, one.context, f"{1e3 * one.ms:.0f}", f"{one.bytes_per_s / 1e9:.0f}", f"{share:.0%}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        rows.append({"rows": one.rows, "context": one.context, "ms": one.ms, "share": share})
    return rows


def measure_generation(device: torch.device, dry_run: bool) -> list[dict[str, Any]]:
    """Ours and the peer in turn, for each shape and load."""
    from benchmarks.gpu import generation

    shapes = {"tiny": generation.TINY} if dry_run else generation.SHAPES
    loads = (generation.TINY_LOAD,) if dry_run else generation.LOADS
    columns = "shape, requests, graphs, tokens/s, transformers, ratio, same texts, step ms, GPU idle, gap us"
    print(f"| {columns.replace(', ', ' | ')} |\n{'|---' * len(columns.split(', '))}|")
    rows: list[dict[str, Any]] = []
    for name, config in shapes.items():
        model = generation.make_model(config, device, "triton")
        for load in loads:
            peer, others = generation.measure_peer(model, load)
            for captured in (True, False):
                ours, texts = generation.measure_ours(model, load, captured)
                idle = generation.measure_idle(model, load, captured)
                same = sum(a == b for a, b in zip(sorted(texts), sorted(others), strict=True))
                gap = "not seen" if idle.gap_us is None else f"{idle.gap_us:.0f}"
                cells = (
                    name, load.requests, "on" if captured else "off", f"{ours:.0f}", f"{peer:.0f}",
                    f"{ours / peer:.2f}", f"{same} of {load.requests}", f"{idle.step_ms:.2f}",
                    f"{idle.share:.0%}", gap,
                )  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                rows.append({
                    "shape": name, "requests": load.requests, "graphs": captured, "ours": ours, "peer": peer,
                    "same": same, "step_ms": idle.step_ms, "idle": idle.share, "gap_us": idle.gap_us,
                })  # fmt: skip
        del model
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch finds no GPU here; --dry-run goes through all of it on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    name = "a CPU, tiny shapes" if options.dry_run else torch.cuda.get_device_name(device)
    print(f"{name}; torch {torch.__version__}", flush=True)
    figures: dict[str, Any] = {"device": name}
    good = True
    if "correctness" in options.parts:
        print("\n## Correctness\n", flush=True)
        good, figures["correctness"] = check_correctness(device, options.dry_run)
    if "bandwidth" in options.parts:
        print("\n## Decode attention\n", flush=True)
        figures["bandwidth"] = measure_bandwidth(device, options.dry_run)
    if "generation" in options.parts:
        print("\n## Generation\n", flush=True)
        figures["generation"] = measure_generation(device, options.dry_run)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
