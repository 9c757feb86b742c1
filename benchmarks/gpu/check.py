"""All that is claimed of the GPU path, checked and measured by one command, in minutes on one GPU.

    python -m benchmarks.gpu.check [--parts correctness,bandwidth,generation] [--json figures.json]
    python -m benchmarks.gpu.check --dry-run      # tiny shapes on a CPU, under Triton's interpreter

- correctness: every kernel against its reference, and attention at the sizes and in the types of real models.
- bandwidth: decode attention as a share of what a copy moves. The goal is 90 %.
- generation: output tokens a second on random-weight 1B and 8B Llama shapes, against transformers' continuous
  batching, and the share of a decode step in which the GPU does nothing.

Exits with 1 where a kernel is wrong.
"""

from __future__ import annotations

import argparse
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
    from benchmarks.gpu import correctness

    good = correctness.run_tests(dry_run)
    print(f"the kernels' tests: {'passed' if good else 'FAILED'}", flush=True)
    rows = []
    for check in correctness.check_attention(device, dry_run):
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
    columns = ("shape", "requests", "tokens/s", "transformers", "ratio", "same texts", "step ms", "GPU idle")
    print("| " + " | ".join(columns) + f" |\n{'|---' * len(columns)}|")
    rows = []
    for name, config in shapes.items():
        model = generation.make_model(config, device, "triton")
        for load in loads:
            ours, texts = generation.measure_ours(model, load)
            peer, others = generation.measure_peer(model, load)
            idle = generation.measure_idle(model, load)
            same = sum(a == b for a, b in zip(sorted(texts), sorted(others), strict=True))
            cells = (
                name, load.requests, f"{ours:.0f}", f"{peer:.0f}", f"{ours / peer:.2f}",
                f"{same} of {load.requests}", f"{idle.step_ms:.2f}", f"{idle.share:.0%}",
            )  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            figures = {"ours": ours, "peer": peer, "same": same, "step_ms": idle.step_ms, "idle": idle.share}
            rows.append({"shape": name, "requests": load.requests} | figures)
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
