"""Owns what is said of a simulation: the figures, as values and as a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from scheduler_service.simulation.outcome import Outcome, Passage


class FileError(Exception):
    """A file can't be written; the message names it and its option."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a time in milliseconds. All zero where there is nothing to measure."""

    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Of times in seconds."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0, 0.0)
        values = np.asarray(seconds, np.float64) * 1e3
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant's share."""

    requests: int
    output_tokens: int
    ttft: Percentiles
    mean_ms_per_token: float  # end to end


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. Rates are by the simulation's clock, from its start to its last token."""

    requests: int
    refused: int
    duration_s: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft: Percentiles
    itl: Percentiles
    e2e: Percentiles
    goodput_per_s: float  # requests a second that kept both limits
    good_share: float  # of all requests, refused ones too
    preemptions: int
    preemptions_kept: int  # of these, those whose KV was kept in host memory
    swapped_blocks: int  # copied to host memory or back
    preempted_share: float  # of the requests that finished, those that were preempted at least once
    moves: int  # to another worker, since theirs was lost or drained
    moved_share: float  # of the requests that finished, those that moved at least once
    kv_used_mean: float
    kv_used_max: float
    prefix_hit_share: float
    busy: float
    steps: int
    latency_equality: float
    """Jain's index of the tenants' mean time per output token: 1 is equal, 1/tenants is one-sided."""
    tenants: dict[str, TenantReport]

    def as_dict(self) -> dict[str, object]:
        """Everything, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a good request keeps: time to the first token, and mean time between tokens."""

    ttft_s: float
    itl_s: float

    def __str__(self) -> str:
        """In words."""
        first, gap = self.ttft_s * 1e3, self.itl_s * 1e3
        return f"first token within {first:g} ms, mean gap at most {gap:g} ms"

    def met(self, passage: Passage) -> bool:
        """Whether a request kept both."""
        gaps = max(1, passage.output_tokens - 1)
        mean_gap = (passage.last_token - passage.first_token) / gaps
        return passage.first_token - passage.arrival <= self.ttft_s and mean_gap <= self.itl_s


def summarize(outcome: Outcome, objective: Objective) -> Report:
    """The figures of a run."""
    done = outcome.finished
    seconds = outcome.end_s or 1.0
    good = sum(objective.met(passage) for passage in done)
    used = [sample.kv_used for sample in outcome.samples]
    tenants = _tenants(done)
    return Report(
        requests=len(done),
        refused=outcome.refused,
        duration_s=outcome.end_s,
        output_tokens_per_s=sum(passage.output_tokens for passage in done) / seconds,
        requests_per_s=len(done) / seconds,
        ttft=Percentiles.of([passage.first_token - passage.arrival for passage in done]),
        itl=Percentiles.of(outcome.gaps_s),
        e2e=Percentiles.of([passage.end - passage.arrival for passage in done]),
        goodput_per_s=good / seconds,
        good_share=good / max(1, len(done) + outcome.refused),
        preemptions=outcome.preemptions,
        preemptions_kept=outcome.preemptions_kept,
        swapped_blocks=outcome.swapped_blocks,
        preempted_share=sum(passage.preemptions > 0 for passage in done) / max(1, len(done)),
        moves=outcome.moves,
        moved_share=sum(passage.moves > 0 for passage in done) / max(1, len(done)),
        kv_used_mean=float(np.mean(used)) if used else 0.0,
        kv_used_max=max(used, default=0.0),
        prefix_hit_share=outcome.prefix_hit_tokens / max(1, outcome.prefix_queried_tokens),
        busy=outcome.busy,
        steps=outcome.steps,
        latency_equality=jain([tenant.mean_ms_per_token for tenant in tenants.values()]),
        tenants=tenants,
    )


def _tenants(done: list[Passage]) -> dict[str, TenantReport]:
    groups: dict[str, list[Passage]] = defaultdict(list)
    for passage in done:
        groups[passage.tenant].append(passage)
    return {
        name: TenantReport(
            requests=len(group),
            output_tokens=sum(passage.output_tokens for passage in group),
            ttft=Percentiles.of([passage.first_token - passage.arrival for passage in group]),
            mean_ms_per_token=float(np.mean([(p.end - p.arrival) / p.output_tokens * 1e3 for p in group])),
        )
        for name, group in sorted(groups.items())
    }


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index, 1 where all are equal."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


_ROWS = (
    ("requests", "{0.requests}"),
    ("refused", "{0.refused}"),
    ("duration, s", "{0.duration_s:.1f}"),
    ("requests/s", "{0.requests_per_s:.2f}"),
    ("output tokens/s", "{0.output_tokens_per_s:.0f}"),
    ("TTFT p50, ms", "{0.ttft.p50_ms:.0f}"),
    ("TTFT p90, ms", "{0.ttft.p90_ms:.0f}"),
    ("TTFT p99, ms", "{0.ttft.p99_ms:.0f}"),
    ("ITL p50, ms", "{0.itl.p50_ms:.1f}"),
    ("ITL p99, ms", "{0.itl.p99_ms:.1f}"),
    ("E2E p50, ms", "{0.e2e.p50_ms:.0f}"),
    ("E2E p99, ms", "{0.e2e.p99_ms:.0f}"),
    ("goodput, requests/s", "{0.goodput_per_s:.2f}"),
    ("within the objective", "{0.good_share:.1%}"),
    ("preemptions", "{0.preemptions}"),
    ("of these, KV kept", "{0.preemptions_kept}"),
    ("preempted requests", "{0.preempted_share:.1%}"),
    ("moves from lost workers", "{0.moves}"),
    ("moved requests", "{0.moved_share:.1%}"),
    ("KV used, mean", "{0.kv_used_mean:.1%}"),
    ("KV used, most", "{0.kv_used_max:.1%}"),
    ("prefix hits", "{0.prefix_hit_share:.1%}"),
    ("workers busy", "{0.busy:.1%}"),
    ("latency equality", "{0.latency_equality:.3f}"),
)


def table(reports: dict[str, Report], objective: Objective) -> Table:
    """The reports side by side, a column each under its name."""
    made = Table("", *reports, caption=f"objective: {objective}")
    for column in made.columns[1:]:
        column.justify = "right"
    for label, text in _ROWS:
        made.add_row(label, *(text.format(each) for each in reports.values()))
    return made


def tenant_table(report: Report) -> Table:
    """One report by tenant."""
    made = Table("tenant", "requests", "output tokens", "TTFT p50, ms", "TTFT p99, ms", "ms per token")
    for name, tenant in report.tenants.items():
        made.add_row(
            name,
            str(tenant.requests),
            str(tenant.output_tokens),
            f"{tenant.ttft.p50_ms:.0f}",
            f"{tenant.ttft.p99_ms:.0f}",
            f"{tenant.mean_ms_per_token:.1f}",
        )
    return made


def write_json(path: Path, reports: dict[str, Report]) -> None:
    """Writes all figures of runs by their names. Raises FileError."""
    content = {name: report.as_dict() for name, report in reports.items()}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise FileError(f"--json {path}: {error.strerror}") from None
