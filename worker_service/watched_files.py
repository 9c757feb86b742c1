"""Owns values that come from files and follow them: certificates and the cluster's secret.

It knows nothing of what is in the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from worker_service.logs import log_event

_LOOK_INTERVAL_S = 1.0

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_Stamp = tuple[int, int, int]  # time of the last change in ns, size in bytes, inode


class WatchedFiles(Generic[_T]):
    """A value that is read again after one of its files has changed. Any thread may ask for it.

    Files that cannot be used any more leave the last good value in place, with a warning in the log: whoever
    replaces a certificate and its key does so one after the other.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        """Reads them. Raises what `read` raises; OSError or ValueError where the files are at fault."""
        self._paths = tuple(paths)
        self._read = read
        # Before they are read: a change meanwhile is seen at the next look.
        self._stamps = self._stamps_now()
        self._value = read()
        self._looked_at = time.monotonic()

    def get(self) -> _T:
        """The value, at most a second behind the files."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            stamps = self._stamps_now()
            if stamps != self._stamps:
                self._stamps = stamps
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            kept = "what they said before"
            log_event(_LOGGER, logging.WARNING, "files unusable", files=names, reason=str(error), kept=kept)
        else:
            log_event(_LOGGER, logging.INFO, "files read again", files=names)

    def _stamps_now(self) -> tuple[_Stamp | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
