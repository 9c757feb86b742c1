from __future__ import annotations

import io
import json
import logging

import pytest

from scheduler_service import logs
from scheduler_service.logs import EventLog


@pytest.fixture
def restored():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger(logs.ROOT).setLevel(logging.NOTSET)


def written(fmt: str, level: str, write) -> list[str]:
    stream = io.StringIO()
    logs.setup(level, fmt, stream)
    write(EventLog("test"))
    return stream.getvalue().splitlines()


def test_json_lines_have_fields(restored):
    (line,) = written("json", "info", lambda log: log.info("worker_ready", worker_id="w 1", blocks=3))
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "info",
        "logger": "tidegate.test",
        "event": "worker_ready",
        "worker_id": "w 1",
        "blocks": 3,
    }


def test_console_lines_quote_what_needs_it(restored):
    (line,) = written("console", "info", lambda log: log.warning("lost", reason="no answer", worker="w1"))
    assert line.split(" ", 1)[1] == "WARNING lost reason='no answer' worker=w1"


def test_levels_hide_what_is_less_severe(restored):
    def write(log: EventLog) -> None:
        log.debug("a")
        log.info("b")
        log.warning("c")

    assert [json.loads(line)["event"] for line in written("json", "warning", write)] == ["c"]


def test_errors_in_an_except_clause_have_the_traceback(restored):
    def write(log: EventLog) -> None:
        log.error("plain")
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.error("fault", incident_id="i1")

    plain, fault = map(json.loads, written("json", "info", write))
    assert "exception" not in plain
    assert "RuntimeError: boom" in fault["exception"]


def test_repeated_warnings_are_counted_and_not_written(restored, monkeypatch):
    now = 100.0
    monkeypatch.setattr("scheduler_service.logs.time.monotonic", lambda: now)

    def write(log: EventLog) -> None:
        nonlocal now
        for key in ("a", "a", "b", "a"):
            log.repeated("refused", key, key=key)
        now += 11
        log.repeated("refused", "a", key="a")

    lines = [json.loads(line) for line in written("json", "info", write)]
    assert [(line["key"], line.get("left_out")) for line in lines] == [("a", None), ("b", None), ("a", 2)]


def test_incident_ids_differ():
    assert len({logs.new_incident_id() for _ in range(100)}) == 100


def test_a_flood_of_one_event_is_cut_and_counted(restored, monkeypatch):
    now = 100.0
    monkeypatch.setattr("scheduler_service.logs.time.monotonic", lambda: now)

    def write(log: EventLog) -> None:
        nonlocal now
        for i in range(130):
            log.info("request_finished", request_id=f"r{i}")
        log.info("worker_ready")
        now += 1.5
        log.info("request_finished", request_id="later")
        log.info("request_finished", request_id="latest")

    lines = [json.loads(line) for line in written("json", "info", write)]
    assert [line["event"] for line in lines].count("request_finished") == 102
    assert [line["event"] for line in lines].count("worker_ready") == 1
    later = next(line for line in lines if line.get("request_id") == "later")
    assert later["left_out"] == 30
    assert "left_out" not in lines[-1]
