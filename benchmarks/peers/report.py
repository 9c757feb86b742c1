"""What is said of a comparison: a table for each workload, JSON for programs.

Owns medians and ratios. A ratio is between runs of one round, the median over rounds is shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers.systems import PEERS, TIDEGATE, System
from tidegate_client.bench.figures import Figures
from tidegate_client.bench.run import Run

_COLUMNS: dict[str, Callable[[Figures], float]] = {
    "output tokens/s": lambda figures: figures.output_tokens_per_s,
    "TTFT ms": lambda figures: figures.ttft.mean_ms,
    "p99": lambda figures: figures.ttft.p99_ms,
    "ITL ms": lambda figures: figures.itl.mean_ms,
    "p99 ": lambda figures: figures.itl.p99_ms,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload sent once to one system."""

    system: System
    round: int
    run: Run
    peak_rss_gib: float
    """Of all its processes together, since they were started."""
    start_s: float
    others_cpu_s: float
    """What systems that should have been idle computed meanwhile."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "system": self.system.name,
            "weights": self.system.weights,
            "round": self.round,
            "peak_rss_gib": self.peak_rss_gib,
            "start_s": self.start_s,
            "others_cpu_s": self.others_cpu_s,
            **self.run.as_dict(),
        }


def table(measured: Sequence[Measured], workload: str) -> Table:
    """Returns a row for each system: medians over rounds, and the ratio of ours to its best peer."""
    title = next(m.run.title for m in measured if m.run.workload == workload)
    made = Table("system", "weights", *_COLUMNS, "RSS GiB", "failed", "to the best peer", title=title)
    for column in made.columns[2:]:
        column.justify = "right"
    rows = [m for m in measured if m.run.workload == workload]
    for system in (*TIDEGATE, *PEERS.values()):
        its = [m for m in rows if m.system == system]
        if not its:
            continue
        medians = [statistics.median(read(m.run.figures) for m in its) for read in _COLUMNS.values()]
        failed = sum(sum(m.run.figures.errors.values()) for m in its)
        made.add_row(
            system.name,
            system.weights,
            *(f"{value:.1f}" for value in medians),
            f"{max(m.peak_rss_gib for m in its):.1f}",
            str(failed),
            _ratio(its, [m for m in rows if _is_peer_of(system, m.system)]),
        )
    return made


def _is_peer_of(ours: System, other: System) -> bool:
    return ours in TIDEGATE and other not in TIDEGATE and other.weights == ours.weights


def _ratio(ours: Sequence[Measured], peers: Sequence[Measured]) -> str:
    """The median over rounds of our rate over that of the peer whose median is the best."""
    if not peers:
        return ""
    rates: dict[str, list[float]] = {}
    for m in peers:
        rates.setdefault(m.system.name, []).append(m.run.figures.output_tokens_per_s)
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    own = [m.run.figures.output_tokens_per_s for m in ours]
    ratio = statistics.median(a / b for a, b in zip(own, rates[best], strict=True))
    return f"{ratio:.2f} x {best}"


def write_json(path: Path, options: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Writes every run's figures."""
    runs = [m.as_dict() for m in measured]
    path.write_text(json.dumps({"options": options, "runs": runs}, indent=2, default=str) + "\n")
