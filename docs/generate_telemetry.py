"""Writes docs/metrics.md and docs/tracing.md from the names that the services use.

python docs/generate_telemetry.py [--check]    # with --check: says whether the pages are current
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tidegate_telemetry import catalogue, names
from tidegate_telemetry.names import Instrument, Metric, Service

DOCS = Path(__file__).parent
_NOTE = "<!-- Made by docs/generate_telemetry.py from tidegate_telemetry/. Edit those. -->"

_METRICS = f"""{_NOTE}
# Metrics

Both services have metrics, off unless asked for:

- **Prometheus** scrapes `/metrics` where `--metrics-port` is set (`--metrics-host`, 127.0.0.1 by
  default: the endpoint has no access control).
- **OTLP** pushes where `OTEL_EXPORTER_OTLP_ENDPOINT`, or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, names a
  receiver. `OTEL_METRICS_EXPORTER=none` and `OTEL_SDK_DISABLED=true` switch that off,
  `OTEL_METRIC_EXPORT_INTERVAL` sets the interval (milliseconds).

Names are those of a scrape; OTLP has the name in brackets where it is another. Labels have `_` for `.`
in a scrape. [`deploy/prometheus/rules.yaml`](../deploy/prometheus/rules.yaml) has alerts over them. A
candidate is one of the `n` outputs of a request.
"""

_TRACING = f"""{_NOTE}
# Traces

Traces are off unless `OTEL_EXPORTER_OTLP_ENDPOINT`, or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, names an
OTLP receiver (gRPC); set it for the scheduler and for workers. `OTEL_TRACES_EXPORTER=none` and
`OTEL_SDK_DISABLED=true` switch them off, `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` choose what
is sampled (all of it, unless the caller decided).

A client's `traceparent` is honoured, and the request's own goes to the worker with the request: one
trace from the caller to the forward. There is no prompt and no output in any span.

```
{catalogue.RPC_SPAN.format(method="Generate")}     scheduler
└─ {catalogue.REQUEST_SPAN}          scheduler     links ──▶ step
   ├─ queue                          scheduler
   ├─ prefill                        scheduler
   ├─ decode                         scheduler
   ├─ worker.prefill                 worker
   └─ worker.decode                  worker

step                                 scheduler     links ──▶ {catalogue.REQUEST_SPAN}
└─ step.execute                      worker
```

**It adds up.** `queue`, `prefill`, `decode` and `preempted` of a candidate follow each other without a
gap, from the beginning to the end of the request's span. Their sums are the timings that `Finished`
tells the client, and what the histograms count. The worker's spans lie beside them: what they leave out
is the way to the worker and back.

**Steps.** Thousands of steps have nothing to tell. Of each stay of a sampled request on a worker, three
are recorded: its first, its last and its slowest. So links lead from a request to them, and from each of
them to a few of the sampled requests that shared it, the one that had it recorded among them.

**Cost.** Nothing is done for a token; a step costs microseconds while sampled requests are on its
worker, and a span is made once all of it is known. Spans wait in a bounded queue. What a receiver does
not take is dropped, and counted in `tidegate_telemetry_dropped_total`. `benchmarks/telemetry_cost.py`
measures it, by turns in one run. With 64 streams of 128 tokens and steps of 10 ms, which keep a scheduler's
core busy (5,900 tokens/s), on 30 November 2026, medians of eight rounds: metrics 1.008 of the throughput
without, metrics and 1 % of traces 1.002, all traces 0.985. With the demo model on two cores all three are
within the noise of 4 %.
"""


def main() -> int:
    """Returns 1 if --check finds a page that is not current."""
    pages = {DOCS / "metrics.md": metrics_page(), DOCS / "tracing.md": tracing_page()}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in pages.items() if not path.exists() or path.read_text() != text]
        if stale:
            sys.stderr.write(f"not current: {', '.join(stale)}; run python docs/generate_telemetry.py\n")
        return bool(stale)
    for path, text in pages.items():
        path.write_text(text)
    return 0


def metrics_page() -> str:
    """docs/metrics.md."""
    parts = [_METRICS]
    for title, services in (
        ("The scheduler", (Service.SCHEDULER, Service.BOTH)),
        ("A worker", (Service.WORKER, Service.BOTH)),
    ):
        parts.append(f"## {title}\n")
        for instrument in Instrument:
            chosen = [m for m in names.METRICS if m.service in services and m.instrument is instrument]
            if chosen:
                parts.append(_metric_table(instrument, chosen))
    return "\n".join(parts)


def _metric_table(instrument: Instrument, metrics: list[Metric]) -> str:
    rows = [
        f"### {instrument.value.capitalize()}s\n",
        "| name | unit | labels | what |",
        "| --- | --- | --- | --- |",
    ]
    for metric in metrics:
        shown = f"`{metric.prometheus_name}`"
        if metric.prometheus_name.removesuffix("_total") != metric.name:
            shown += f" (`{metric.name}`)"
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| {shown} | {metric.unit.strip('{}')} | {labels} | {metric.description} |")
    if instrument is Instrument.HISTOGRAM:
        rows.append("\nBucket bounds:\n")
        bounds = {metric.bounds: [] for metric in metrics}
        for metric in metrics:
            bounds[metric.bounds].append(f"`{metric.prometheus_name}`")
        rows += [
            f"- {', '.join(chosen)}: {', '.join(f'{b:g}' for b in each)}" for each, chosen in bounds.items()
        ]
    return "\n".join(rows) + "\n"


def tracing_page() -> str:
    """docs/tracing.md."""
    parts = [_TRACING, "## Spans\n"]
    for span in catalogue.SPANS:
        parts.append(
            f"### `{span.name}`\n\n{span.covers}\n\nMade by the {span.process}; child of {span.parent}."
        )
        if span.attributes:
            parts.append(f"Attributes: {_codes(span.attributes)}.")
        if span.events:
            parts.append(f"Events: {_codes(span.events)}.")
        parts.append("")
    parts += ["## Events\n", "| event | when | attributes |", "| --- | --- | --- |"]
    parts += [f"| `{name}` | {when} | {_codes(has)} |" for name, (when, has) in catalogue.EVENTS.items()]
    parts += ["\n## Attributes of our own\n", "| attribute | what |", "| --- | --- |"]
    parts += [f"| `{name}` | {what} |" for name, what in catalogue.ATTRIBUTES.items()]
    parts.append(
        "\nAll others are those of the OpenTelemetry conventions (`gen_ai.*`, `rpc.*`, `error.type`).\n"
    )
    return "\n".join(parts)


def _codes(items: tuple[str, ...]) -> str:
    return ", ".join(f"`{item}`" for item in items)


if __name__ == "__main__":
    sys.exit(main())
