"""Owns the plots of simulations: latencies, KV use, what batches were made of. Needs matplotlib, an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_service.simulation.outcome import Outcome

_MOST_POINTS = 2_000  # of a curve
_SIZE = (10.0, 4.5)  # inches


class PlotsMissingError(Exception):
    """matplotlib is not installed."""


def draw(outcomes: Mapping[str, Outcome], folder: Path) -> list[Path]:
    """Writes latencies.png, kv_use.png and batches.png, and returns their paths.

    Raises:
        PlotsMissingError: see there.
        OSError: the folder cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissingError(
            "plots need matplotlib: in a clone of Tidegate, pip install '.[plots]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, fill in (("latencies", _latencies), ("kv_use", _kv_use), ("batches", _batches)):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure, outcomes)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _latencies(figure: Any, outcomes: Mapping[str, Outcome]) -> None:
    """Cumulative shares of the time to the first token, between tokens, and to the end."""
    panels = figure.subplots(1, 3, sharey=True)
    for name, outcome in outcomes.items():
        done = outcome.finished
        seconds = (
            [passage.first_token - passage.arrival for passage in done],
            outcome.gaps_s,
            [passage.end - passage.arrival for passage in done],
        )
        for panel, values in zip(panels, seconds, strict=True):
            if len(values):
                shares = np.linspace(0.0, 1.0, min(_MOST_POINTS, len(values)))
                milliseconds = np.quantile(np.asarray(values, np.float64), shares) * 1e3
                panel.plot(milliseconds, shares, label=name)
    for panel, title in zip(panels, ("first token", "between tokens", "whole request"), strict=True):
        panel.set(title=title, xlabel="ms", xscale="log", ylim=(0, 1))
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("share of all")
    panels[0].legend()


def _kv_use(figure: Any, outcomes: Mapping[str, Outcome]) -> None:
    """Blocks in use, and requests that wait, over time."""
    used, waiting = figure.subplots(1, 2)
    for name, outcome in outcomes.items():
        at_s = [sample.at_s for sample in outcome.samples]
        used.plot(at_s, [100 * sample.kv_used for sample in outcome.samples], label=name)
        waiting.plot(at_s, [sample.waiting for sample in outcome.samples], label=name)
    used.set(title="KV blocks in use", xlabel="s", ylabel="%", ylim=(0, 100))
    waiting.set(title="waiting requests", xlabel="s")
    for panel in (used, waiting):
        panel.grid(visible=True, alpha=0.3)
    used.legend()


def _batches(figure: Any, outcomes: Mapping[str, Outcome]) -> None:
    """Tokens of the mean step over time, prompts' and others'."""
    panels = np.atleast_1d(figure.subplots(1, len(outcomes), sharey=True))
    for panel, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        samples = [sample for sample in outcome.samples if sample.steps]
        at_s = [sample.at_s for sample in samples]
        decode = [sample.decode_tokens / sample.steps for sample in samples]
        prefill = [sample.prefill_tokens / sample.steps for sample in samples]
        panel.stackplot(at_s, decode, prefill, labels=("decode", "prefill"))
        panel.set(title=name, xlabel="s")
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("tokens in the mean step")
    panels[0].legend(loc="upper right")
