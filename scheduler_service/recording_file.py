"""Owns the shape of a recording on disk: compressed frames of JSON lines, each with its length and checksum.

The first line has the number of the format and the version of the program that wrote it. The number changes
with the frames, with the records in them, and whenever the core is known to decide otherwise than before.

A process that is killed loses at most what came since the last flush(); what was written is whole, and what
could not be written whole is taken back.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

OWN_VERSION = version("tidegate")

_FORMAT = 2
_HEADER = re.compile(rb"tidegate recording (\d{1,9})(?: ([\w.+-]+))?\n", re.ASCII)
_MAX_HEADER_BYTES = 256
_FRAME = struct.Struct("<II")  # bytes that follow, and their CRC-32
_FRAME_BYTES = 1 << 16  # before compression
_MAX_FRAME_BYTES = 1 << 28  # of one record that is larger than that, too

Record = list[Any]
"""A call of the core: its name, then what the name says."""


class RecordingError(Exception):
    """A file is no whole recording. The text names the place."""


class DamagedRecordingError(RecordingError):
    """A recording that was cut or changed. All before the place was given."""


class RecordingWriter:
    """Appends records to a new file. Raises OSError where it cannot be written, which ends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        """Size of the file, all of which can be read."""
        self._file = path.open("wb", buffering=0)
        self._append(f"tidegate recording {_FORMAT} {OWN_VERSION}\n".encode())
        self._lines: list[str] = []
        self._size = 0

    def write(self, record: Record) -> None:
        """Appends a record."""
        line = json.dumps(record, separators=(",", ":"))
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Has all that was appended in the file."""
        if self._lines:
            body = zlib.compress("\n".join(self._lines).encode(), 1)
            self._append(_FRAME.pack(len(body), zlib.crc32(body)) + body)
            self._lines, self._size = [], 0

    def close(self) -> None:
        """Ends the file."""
        self.flush()
        self._file.close()

    def _append(self, frame: bytes) -> None:
        left = memoryview(frame)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):  # not every file can be cut; a reader can leave out the rest
                self._file.truncate(self.num_bytes)
            with suppress(OSError):
                self._file.close()
            raise
        self.num_bytes += len(frame)


def recorded_by(path: Path) -> str:
    """The version of the program that wrote a recording.

    Raises:
        RecordingError: it is no recording, or of a format that this version does not play.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _read_header(path, file)


def _read_header(path: Path, file: BinaryIO) -> str:
    header = _HEADER.fullmatch(file.readline(_MAX_HEADER_BYTES))
    if header is None:
        raise RecordingError(f"{path} is not a recording: it does not begin with 'tidegate recording'")
    number, written_by = int(header[1]), header[2].decode() if header[2] else "an early version"
    if number != _FORMAT or header[2] is None:
        raise RecordingError(
            f"{path} is a recording of format {number} by {written_by}; this is {OWN_VERSION}, which plays "
            f"format {_FORMAT}; play it with the version that wrote it, or record anew"
        )
    return written_by


def read_records(path: Path, partial: bool = False) -> Iterator[Record]:
    """The records of a file, in order. `partial`: ends where it was cut or changed.

    Raises:
        RecordingError: it is no recording, of another format, or, as DamagedRecordingError, cut or changed.
        OSError: it cannot be read.
    """
    try:
        yield from _read_records(path)
    except DamagedRecordingError:
        if not partial:
            raise


def _read_records(path: Path) -> Iterator[Record]:
    size = path.stat().st_size
    num_records = 0
    with path.open("rb") as file:
        _read_header(path, file)
        while head := file.read(_FRAME.size):
            place = f"byte {file.tell() - len(head):,} of {size:,}, after {num_records:,} whole records"
            if len(head) < _FRAME.size:
                raise DamagedRecordingError(
                    f"{path} is cut: the frame at {place}, has {len(head)} bytes of its head"
                )
            length, checksum = _FRAME.unpack(head)
            body = file.read(length)
            if len(body) < length:
                raise DamagedRecordingError(
                    f"{path} is cut: the frame at {place}, has {len(body):,} of {length:,} bytes"
                )
            if zlib.crc32(body) != checksum:
                raise DamagedRecordingError(f"{path} is damaged: the frame at {place}, has another checksum")
            for record in _decode(body, f"{path} is damaged: the frame at {place},"):
                num_records += 1
                yield record


def _decode(body: bytes, where: str) -> Iterator[Record]:
    """The records of a frame, whose checksum was right: one that is wrong was written so on purpose."""
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(body, _MAX_FRAME_BYTES)
        if not decompressor.eof:
            raise DamagedRecordingError(
                f"{where} is cut, or has more than {_MAX_FRAME_BYTES:,} bytes unpacked"
            )
        for line in text.decode().split("\n"):
            record = json.loads(line)
            if not isinstance(record, list) or not record or not isinstance(record[0], str):
                raise DamagedRecordingError(f"{where} has a record that is no call")
            yield record
    except (zlib.error, ValueError, RecursionError) as error:
        raise DamagedRecordingError(f"{where} has no records in it: {type(error).__name__}") from error
