"""The journal's file: a changed one is set aside or read, and no scheduler fails to start for it."""

import random
import sqlite3
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path

from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from fuzz.targets.link_frames import END, SPEC

from scheduler_service.journal_codec import READING_ERRORS, Acceptance
from scheduler_service.journal_store import INDEX_BITS, DamagedJournalError, JournalStore
from scheduler_service.presentation import Presentation

_FOLDER = Path(tempfile.mkdtemp(prefix="tidegate-fuzz-"))
_FILE = _FOLDER / "journal"


def _valid() -> bytes:
    store = JournalStore(_FILE)
    for number in range(1, 4):
        spec = replace(SPEC, request_id=f"r{number}")
        store.accept(number, Acceptance(spec, Presentation(), "f", None))
        store.add_tokens(array("q", [number << INDEX_BITS]), array("i", [number]), None)
    store.end(1, 1, END)
    store.close()
    return _FILE.read_bytes()


SEED = _valid()


def make(rng: random.Random) -> bytes:
    """A journal with changed bytes, most of them where rows are."""
    if rng.random() < 0.02:
        return SEED
    used = [page for page in range(0, len(SEED), 512) if any(SEED[page : page + 512])]
    page = rng.choice(used)
    piece = mutate_bytes(rng, SEED[page : page + 512])
    return SEED[:page] + piece + SEED[page + 512 :]


def read(data: bytes) -> None:
    """Opens it as a scheduler does, and asks for what it had."""
    for path in _FOLDER.iterdir():
        path.unlink()
    _FILE.write_bytes(data)
    store = JournalStore(_FILE)
    try:
        for number in range(1, 4):
            store.find(f"r{number}")
    finally:
        store._db.close()


_REFUSES = (DamagedJournalError, OSError, sqlite3.Error, *READING_ERRORS)
TARGET = Target("journal_file", make, read, _REFUSES, 0.02)
