"""Recordings: a file that was cut or changed is said to be, and all before the place is given."""

import json
import random
import struct
import tempfile
import zlib
from pathlib import Path

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.target import Target

from scheduler_service.recording_file import RecordingError, RecordingWriter, read_records

_FILE = Path(tempfile.mkdtemp(prefix="tidegate-fuzz-")) / "recording"
RECORDS = [["new", {"max_num_seqs": 4}], ["plan", 1.5, "w", 77], ["cancel", 2.0, "r", None]]


def _valid() -> bytes:
    writer = RecordingWriter(_FILE)
    for record in RECORDS:
        writer.write(record)
        writer.flush()
    writer.close()
    return _FILE.read_bytes()


SEED = _valid()
_HEAD = SEED.index(b"\n") + 1


def make(rng: random.Random) -> bytes:
    """A changed file; or one whose checksums are right and whose contents are not."""
    kind = rng.random()
    if kind < 0.5:
        return mutate_bytes(rng, SEED)
    text = json.dumps(mutate_json(rng, rng.choice(RECORDS))).encode()
    if kind < 0.7:
        text = mutate_bytes(rng, text)
    if rng.random() < 0.005:
        text = rng.choice((b"[" * 100_000, b"[]" + b" " * (1 << 21)))
    body = zlib.compress(text)
    if kind > 0.9:
        body = mutate_bytes(rng, body)
    return SEED + struct.pack("<II", len(body), zlib.crc32(body)) + body


def read(data: bytes) -> None:
    """Every record of it."""
    _FILE.write_bytes(data)
    for record in read_records(_FILE):
        assert isinstance(record[0], str)


TARGET = Target("recording_file", make, read, (RecordingError, OSError), 0.5)
