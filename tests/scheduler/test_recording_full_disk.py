"""A disk that is full ends a recording, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
from pathlib import Path

import pytest
from core_harness import Harness

from scheduler_service import recording
from scheduler_service.recording import Recorder
from scheduler_service.recording_file import RecordingWriter, read_records
from scheduler_service.replay import replay


class FakeFullDisk(io.FileIO):
    """A file on a disk with room for so many bytes, which writes what fits, as Linux does."""

    room = 0

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(data[: self.room]))
        self.room -= written
        return written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def recorded(path: Path, room: int) -> tuple[Harness, Recorder]:
    writer = RecordingWriter(path)
    writer._file = FakeFullDisk(path, "ab")
    writer._file.room = room
    recorder = Recorder(writer)
    harness = Harness(workers=0)
    harness.core = harness.scheduler = recorder.new_core(harness.config)
    harness.add_worker("w0")
    return harness, recorder


def test_the_core_goes_on_and_what_was_written_plays(path, monkeypatch, caplog):
    monkeypatch.setattr("scheduler_service.recording_file._FRAME_BYTES", 2_000)
    harness, recorder = recorded(path, room=2_500)
    for i in range(40):
        harness.accept(f"r{i}", 8, max_tokens=4)
        harness.run()
    assert recorder.has_stopped
    harness.assert_all_right()
    recorder.close()
    size = path.stat().st_size
    [told] = [each for each in caplog.records if each.message == "recording_stopped"]
    assert told.levelno == logging.ERROR and not told.exc_info
    assert told.fields["path"] == str(path)
    assert told.fields["reason"] == "No space left on device"
    assert told.fields["bytes_written"] == size
    assert "--record" in told.fields["remedy"]
    # What of the last frame had found room was taken back.
    assert 1_000 < size <= 2_500
    calls = [record[0] for record in read_records(path)]
    assert 0 < calls.count("submit") < 40
    assert replay(path).accepted == calls.count("submit")


async def test_the_flush_of_each_second_ends_it_too(path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "_FLUSH_EVERY_S", 0.01)
    harness, recorder = recorded(path, room=0)
    flushing = asyncio.create_task(recorder.flush_often())
    async with asyncio.timeout(10):
        while not recorder.has_stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not flushing.done()
    flushing.cancel()
    harness.accept("after", 8, max_tokens=2)
    harness.run()
    recorder.close()
    assert [each.message for each in caplog.records].count("recording_stopped") == 1
    assert list(read_records(path)) == []


def test_a_disk_that_is_full_at_the_start_is_an_error():
    with pytest.raises(OSError, match="No space left on device"):
        RecordingWriter(Path("/dev/full"))
