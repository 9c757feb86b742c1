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

_NUM_RATES = 2
_PERCENTILES = ("p50", "p90", "p99")


def table(runs: Sequence[Run]) -> Table:
    """Returns a row for each workload and load: medians over its repetitions, and all of its errors."""
    latencies = [f"{name.upper()} {percent}" for name in LATENCIES for percent in _PERCENTILES]
    with_goodput = any(run.figures.goodput_per_s is not None for run in runs)
    columns = ["req/s", "tokens/s", *latencies, *(["goodput/s", "good"] if with_goodput else [])]
    made = Table("workload", "load", *columns, "failed", title="Medians over repetitions; times in ms")
    for column in made.columns[2:]:
        column.justify = "right"
    for name, load in dict.fromkeys((run.workload, str(run.load)) for run in runs):
        alike = [run.figures for run in runs if (run.workload, str(run.load)) == (name, load)]
        medians = [statistics.median(column) for column in zip(*map(_row, alike), strict=True)]
        rates, times = medians[:_NUM_RATES], medians[_NUM_RATES : _NUM_RATES + len(latencies)]
        cells = [f"{rate:.2f}" for rate in rates[:1]] + [f"{rate:.1f}" for rate in rates[1:]]
        cells += [f"{time:.1f}" if time < 100 else f"{time:.0f}" for time in times]
        if with_goodput:
            goodput_per_s, good_share = medians[-2:]
            cells += [f"{goodput_per_s:.2f}", f"{good_share:.0%}"]
        made.add_row(name, load, *cells, _errors(alike))
    return made


def _row(figures: Figures) -> list[float]:
    spreads = [getattr(figures, name) for name in LATENCIES]
    times = [getattr(spread, f"{percent}_ms") for spread in spreads for percent in _PERCENTILES]
    good = [figures.goodput_per_s or 0.0, figures.good_share or 0.0]
    return [figures.requests_per_s, figures.output_tokens_per_s, *times, *good]


def _errors(alike: Sequence[Figures]) -> str:
    errors: Counter[str] = Counter()
    for figures in alike:
        errors.update(figures.errors)
    return ", ".join(f"{count} {code}" for code, count in errors.most_common()) or "0"


def write_json(path: Path, target: str, runs: Sequence[Run]) -> None:
    """Writes the figures of every run."""
    path.write_text(json.dumps({"target": target, "runs": [run.as_dict() for run in runs]}, indent=2) + "\n")
