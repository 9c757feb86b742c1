"""docs/metrics.md and docs/tracing.md say what the services do: they are made from the names themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tidegate_telemetry import catalogue, names

ROOT = Path(__file__).parents[2]


def constants(prefix: str) -> set[str]:
    return {
        value for name, value in vars(names).items() if name.startswith(prefix) and isinstance(value, str)
    }


def test_the_pages_are_current():
    command = [sys.executable, str(ROOT / "docs" / "generate_telemetry.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_span_and_event_has_its_entry():
    described = {span.name for span in catalogue.SPANS}
    assert constants("SPAN_") == described - {catalogue.REQUEST_SPAN, catalogue.RPC_SPAN}
    assert constants("EVENT_") == set(catalogue.EVENTS)
    assert {event for span in catalogue.SPANS for event in span.events} == set(catalogue.EVENTS)


def test_every_attribute_of_our_own_is_described():
    own = {
        value for value in vars(names).values() if isinstance(value, str) and value.startswith("tidegate.")
    }
    own |= set(names.PHASE_S.values())
    assert own == set(catalogue.ATTRIBUTES)
    used = {name for span in catalogue.SPANS for name in span.attributes}
    used |= {name for _, has in catalogue.EVENTS.values() for name in has}
    assert own - used == {names.STEP_ROLE}  # of links


def test_metrics_have_one_name_each_and_a_description():
    shown = [metric.prometheus_name for metric in names.METRICS]
    assert len(set(shown)) == len(shown)
    assert all(metric.description.endswith(".") for metric in names.METRICS)
    assert all(bool(m.bounds) == (m.instrument is names.Instrument.HISTOGRAM) for m in names.METRICS)
    assert all(list(m.bounds) == sorted(set(m.bounds)) for m in names.METRICS)
