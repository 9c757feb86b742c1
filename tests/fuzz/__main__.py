"""Feeds targets with inputs: `python -m fuzz --inputs 1000000`, which is `make fuzz`.

Tells of inputs that raise what the target does not declare, that take too long, and of memory that grows. The
same seed gives the same inputs. What fails is written beside, to be made a test.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from fuzz.target import Target, try_input
from fuzz.targets import load

TIME_LIMIT_S = 2.0
MOST_GROWTH_MIB = 24.0
_MOST_FINDINGS = 20


def resident_mib() -> float:
    """This process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


class Run:
    """Inputs to one target after another, and what they showed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.findings: Counter[str] = Counter()
        self._seed = seed
        self._folder = folder

    def feed(self, target: Target, num_inputs: int) -> None:
        """Feeds one target, and tells how that was."""
        rng = random.Random(f"{self._seed}/{target.name}")
        accepted, slowest_s, start = 0, 0.0, time.perf_counter()
        warm_mib = resident_mib()
        for number in range(num_inputs):
            if number == num_inputs // 10:
                warm_mib = resident_mib()
            data = target.make(rng)
            began = time.perf_counter()
            try:
                accepted += try_input(target, data, TIME_LIMIT_S)
            except Exception as error:
                self._note(target, number, data, error)
            slowest_s = max(slowest_s, time.perf_counter() - began)
        growth_mib = resident_mib() - warm_mib
        slowest_ms = 1000 * slowest_s
        if growth_mib > MOST_GROWTH_MIB:
            self.findings[f"{target.name}: memory grew by {growth_mib:.0f} MiB"] += 1
        print(
            f"{target.name:17} {num_inputs:9,} inputs, {accepted / max(1, num_inputs):4.0%} accepted, "
            f"{time.perf_counter() - start:6.1f} s, slowest {slowest_ms:5.0f} ms, {growth_mib:+5.1f} MiB",
            flush=True,
        )

    def _note(self, target: Target, number: int, data: bytes, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        finding = f"{target.name}: {type(error).__name__} in {Path(place.filename).name}, {place.name}"
        self.findings[finding] += 1
        if self.findings[finding] == 1 and len(self.findings) <= _MOST_FINDINGS:
            self._folder.mkdir(parents=True, exist_ok=True)
            kept = self._folder / f"{target.name}-{self._seed}-{number}"
            kept.write_bytes(data)
            print(f"FOUND {finding}: {error}; input {kept}", flush=True)
            traceback.print_exception(error, file=sys.stdout)


def main() -> int:
    """Runs. The exit status is 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs, of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"), help="folder for what fails")
    args = parser.parse_args()
    targets = [target for target in load() if not args.target or target.name in args.target]
    run = Run(args.seed, args.findings)
    total = sum(target.share for target in targets)
    for target in targets:
        run.feed(target, round(args.inputs * target.share / total))
    for finding, count in run.findings.items():
        print(f"{count:7,} x {finding}")
    return 1 if run.findings else 0


if __name__ == "__main__":
    sys.exit(main())
