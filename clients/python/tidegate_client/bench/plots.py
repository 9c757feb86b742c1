"""Pictures of runs, as PNG: how latencies are distributed, and what they cost in throughput.

Needs matplotlib, which the extra `plots` brings; it is imported when the first picture is drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate_client.bench.errors import PlanError
from tidegate_client.bench.figures import latencies_s
from tidegate_client.bench.run import Run

_PANELS = {"ttft": "time to first token", "itl": "time between tokens", "e2e": "end to end"}


def require_matplotlib() -> None:
    """Raises PlanError if it isn't installed, so that nobody learns of it after the measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError("plots need matplotlib: in a clone of Tidegate, pip install '.[plots]'") from None


def draw(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Draws and returns the files: latencies.png, and loads.png where a workload has several loads."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_save(_distributions(runs), folder / "latencies.png")]
    if len(_groups(runs)) > len({run.workload for run in runs}):
        drawn.append(_save(_trade(runs), folder / "loads.png"))
    return drawn


def _figure(columns: int) -> tuple[Any, Any]:
    require_matplotlib()
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(5 * columns, 4), layout="constrained")
    return figure, figure.subplots(1, columns)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _distributions(runs: Sequence[Run]) -> Any:
    """A line for each workload and load, over all its repetitions: the share of requests within a time."""
    figure, panels = _figure(len(_PANELS))
    for (workload, load), alike in _groups(runs).items():
        times = latencies_s([passage for run in alike for passage in run.passages])
        for panel, name in zip(panels, _PANELS, strict=True):
            values_ms = sorted(value * 1000 for value in times[name])
            shares = [(i + 1) / len(values_ms) for i in range(len(values_ms))]
            panel.step(values_ms, shares, where="post", label=f"{workload}, {load}")
    for panel, title in zip(panels, _PANELS.values(), strict=True):
        panel.set(xlabel=f"{title}, ms", ylabel="share within", xscale="log", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    return figure


def _trade(runs: Sequence[Run]) -> Any:
    """Output tokens a second against latencies, a point for each load."""
    shown = {"ttft": "time to first token", "itl": "time between tokens"}
    figure, panels = _figure(len(shown))
    for workload in dict.fromkeys(run.workload for run in runs):
        groups = [alike for (name, _), alike in _groups(runs).items() if name == workload]
        rates = [statistics.median(run.figures.output_tokens_per_s for run in alike) for alike in groups]
        for panel, latency in zip(panels, shown, strict=True):
            for percent in ("p50", "p99"):
                times_ms = [
                    statistics.median(
                        getattr(getattr(run.figures, latency), f"{percent}_ms") for run in alike
                    )
                    for alike in groups
                ]
                panel.plot(rates, times_ms, marker="o", label=f"{workload}, {percent}")
            for alike, rate, time_ms in zip(groups, rates, times_ms, strict=True):
                panel.annotate(str(alike[0].load), (rate, time_ms), fontsize="x-small")
    for panel, title in zip(panels, shown.values(), strict=True):
        panel.set(xlabel="output tokens/s", ylabel=f"{title}, ms", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    return figure


def _groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, str(run.load)), []).append(run)
    return groups
