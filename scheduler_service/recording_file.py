"""Owns the shape of a recording on disk: compressed frames of JSON lines, each with its length and checksum.

A process that is killed loses at most the frame of 64 KiB that was being filled; what was written is whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAGIC = b"tidegate recording 1\n"
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
    """Appends records to a new file. Raises OSError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(_MAGIC)
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
            self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
            self._lines, self._size = [], 0
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self.flush()
        self._file.close()


def read_records(path: Path, partial: bool = False) -> Iterator[Record]:
    """The records of a file, in order. `partial`: ends where it was cut or changed.

    Raises:
        RecordingError: it is no recording, or, as DamagedRecordingError, was cut or changed.
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
        if file.read(len(_MAGIC)) != _MAGIC:
            raise RecordingError(
                f"{path} is not a recording: it does not begin with {_MAGIC.decode().strip()!r}"
            )
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
