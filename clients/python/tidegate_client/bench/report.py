"""What is said of runs: a table for people, JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tidegate_client.bench.figures import LATENCIES, Figures
from tidegate_client.bench.run import Run

_PERCENTILES = ("p50", "p90", "p99")


def table(runs: Sequence[Run]) -> Table:
    """Returns a column for each workload and load: medians over its repetitions, and all of its errors."""
    groups = [
        [run for run in runs if (run.workload, str(run.load)) == column]
        for column in dict.fromkeys((run.workload, str(run.load)) for run in runs)
    ]
    made = Table("", *(f"{group[0].workload}\n{group[0].load}" for group in groups))
    for column in made.columns[1:]:
        column.justify = "right"
    shown = [_cells([run.figures for run in group]) for group in groups]
    for label in shown[0]:
        made.add_row(label, *(cells[label] for cells in shown))
    return made


def _cells(alike: Sequence[Figures]) -> dict[str, str]:
    """Returns what is shown of repetitions, by label."""

    def median(name: str) -> float:
        return statistics.median(getattr(figures, name) or 0.0 for figures in alike)

    cells = {
        "requests": str(sum(figures.requests for figures in alike)),
        "failed": _errors(alike),
        "requests/s": f"{median('requests_per_s'):.2f}",
        "output tokens/s": f"{median('output_tokens_per_s'):.1f}",
    }
    for name in LATENCIES:
        for percent in _PERCENTILES:
            times_ms = [getattr(getattr(figures, name), f"{percent}_ms") for figures in alike]
            cells[f"{name.upper()} {percent}, ms"] = f"{statistics.median(times_ms):.1f}"
    if alike[0].goodput_per_s is not None:
        cells["goodput, requests/s"] = f"{median('goodput_per_s'):.2f}"
        cells["within the objective"] = f"{median('good_share'):.0%}"
    return cells


def _errors(alike: Sequence[Figures]) -> str:
    errors: Counter[str] = Counter()
    for figures in alike:
        errors.update(figures.errors)
    return "\n".join(f"{count} {code}" for code, count in errors.most_common()) or "0"


def write_json(path: Path, target: str, runs: Sequence[Run], num_planned: int) -> None:
    """Writes the figures of every run, and whether those are all that were planned."""
    content = {
        "target": target,
        "interrupted": len(runs) < num_planned,
        "planned_runs": num_planned,
        "runs": [run.as_dict() for run in runs],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
