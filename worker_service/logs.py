"""Owns the form of log lines: one event each, JSON or for people. Prompts and outputs never belong in one."""

from __future__ import annotations

import json
import logging
import sys
import time

_READY_LOGGER = "worker_service.ready"
_LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        content = {
            "time": _timestamp(record),
            "level": _level(record),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


class ConsoleFormatter(logging.Formatter):
    """Time, level, event and its fields, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{_timestamp(record)} {_level(record):7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setup_logging(level: str, form: str) -> None:
    """Logs to stderr; the one event that tells the worker is ready goes to stdout, for whoever started it."""
    if form == "auto":
        form = "console" if sys.stderr.isatty() else "json"
    formatter = JsonFormatter() if form == "json" else ConsoleFormatter()
    to_stderr, to_stdout = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stdout)
    to_stderr.setFormatter(formatter)
    to_stdout.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[to_stderr], force=True)
    ready = logging.getLogger(_READY_LOGGER)
    ready.propagate = False
    ready.setLevel(logging.INFO)
    ready.handlers = [to_stdout]


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Logs an event with its fields."""
    logger.log(level, event, extra={"fields": fields})


def log_ready(**fields: object) -> None:
    """Tells, on stdout, that the worker is ready."""
    log_event(logging.getLogger(_READY_LOGGER), logging.INFO, "worker ready", **fields)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _level(record: logging.LogRecord) -> str:
    return _LEVEL_NAMES.get(record.levelno, "error")
