"""Owns the shape of logs: one event a line with named fields, as JSON or for a console. Never prompt text."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

ROOT = "tidegate"
LogFormat = Literal["json", "console"]

_REPEAT_INTERVAL_S = 10.0
_MOST_INFOS_PER_S = 100  # of one event
_MAX_REPEAT_KEYS = 1024


def setup(level: str, fmt: LogFormat, stream: TextIO | None = None) -> None:
    """Sends the project's events to `stream` (standard error); other libraries' from WARNING on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if fmt == "json" else _ConsoleFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())


def new_incident_id() -> str:
    """A short random name that joins what a client is told with what is in the log."""
    return uuid.uuid4().hex[:12]


class EventLog:
    """Writes events: a name in snake_case and fields. One event for each change of state."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")
        self._repeats: dict[tuple[str, str], tuple[float, int]] = {}
        self._infos: dict[str, _Second] = {}

    def debug(self, event: str, /, **fields: Any) -> None:
        """Details for those who look for a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """A normal change of state. At most 100 lines a second for each event; the next one that is written
        then has the number that was left out."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        second = self._infos.setdefault(event, _Second())
        if not second.admits(time.monotonic()):
            return
        if second.left_out:
            fields["left_out"], second.left_out = second.left_out, 0
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Something went wrong and was dealt with."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Something went wrong and somebody lost by it. Inside an `except`, the traceback is added."""
        self._write(logging.ERROR, event, fields, exc_info=sys.exc_info()[0] is not None)

    def repeated(self, event: str, key: str, /, **fields: Any) -> None:
        """A warning that may come often: once in 10 s for each `key`, with the number left out since."""
        now = time.monotonic()
        written_at, left_out = self._repeats.get((event, key), (float("-inf"), 0))
        if now - written_at < _REPEAT_INTERVAL_S:
            self._repeats[event, key] = (written_at, left_out + 1)
            return
        if len(self._repeats) >= _MAX_REPEAT_KEYS:
            self._repeats.clear()
        self._repeats[event, key] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        self._write(logging.WARNING, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)


class _Second:
    """How many lines of one event were written in this second."""

    def __init__(self) -> None:
        self.left_out = 0
        self._began = 0.0
        self._written = 0

    def admits(self, now: float) -> bool:
        if now - self._began >= 1.0:
            self._began, self._written = now, 0
        if self._written >= _MOST_INFOS_PER_S:
            self.left_out += 1
            return False
        self._written += 1
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time_of_day = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(
            f"{name}={value!r}"
            if isinstance(value, str) and (" " in value or not value)
            else f"{name}={value}"
            for name, value in getattr(record, "fields", {}).items()
        )
        line = f"{time_of_day} {record.levelname:<7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
