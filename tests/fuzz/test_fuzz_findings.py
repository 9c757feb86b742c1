"""What fuzzing has found, each as the input that showed it."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from dataclasses import replace

import pytest
from fuzz.targets.link_frames import SPEC
from fuzz.targets.recording_file import RECORDS, SEED

from scheduler_service.addresses import check_address
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.journal_codec import Acceptance
from scheduler_service.journal_store import INDEX_BITS, DamagedJournalError, JournalStore
from scheduler_service.presentation import Presentation
from scheduler_service.recording_file import RecordingError, read_records


@pytest.mark.parametrize("text", ["[-0.5, [[Infinity, -0.5]]]", "[" * 100_000], ids=["infinity", "nesting"])
def test_a_journal_with_such_a_value_is_damaged(tmp_path, text):
    path = tmp_path / "journal"
    store = JournalStore(path)
    store.accept(1, Acceptance(replace(SPEC, request_id="r"), Presentation(), "f", None))
    logprobs = {0: TokenLogprobs(-0.5, ((1, -0.5),))}
    store.add_tokens(array("q", [1 << INDEX_BITS]), array("i", [5]), logprobs)
    store._db.execute("UPDATE logprobs SET logprobs=?", (text,))
    store.close()
    with pytest.raises(DamagedJournalError):
        JournalStore(path)


@pytest.mark.parametrize(
    "body",
    [
        zlib.compress(b"{}"),
        zlib.compress(b"[]"),
        zlib.compress(b"\x8a\xff"),
        zlib.compress(b"[1] [2]"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b'["a"]')[:-3],
        b"not compressed",
    ],
    ids=["no list", "empty", "no text", "two", "nesting", "cut", "raw"],
)
def test_a_recording_with_such_a_frame_is_damaged_and_gives_what_was_before(tmp_path, body):
    path = tmp_path / "recording"
    path.write_bytes(SEED + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    records = read_records(path)
    assert [next(records) for _ in RECORDS] == json.loads(json.dumps(RECORDS))
    with pytest.raises(RecordingError, match="after 3 whole records"):
        next(records)


@pytest.mark.parametrize("address", ["[:1", "[]:1", "[a]:1", "a[::1]:1", "[[::1]]:1"])
def test_brackets_without_an_ipv6_address_are_no_host(address):
    with pytest.raises(ValueError, match="brackets"):
        check_address(address)
