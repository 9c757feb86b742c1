"""Where the journal is, and which options do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import load_config
from scheduler_service.journal_options import default_journal
from scheduler_service.option_sources import ConfigError
from scheduler_service.server import _open_journal


@pytest.fixture(autouse=True)
def state_folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_scheduler_finds_its_journal_again_by_its_address(state_folder):
    assert (
        default_journal("127.0.0.1", 50051) == state_folder / "tidegate" / "journal-127.0.0.1-50051.sqlite3"
    )
    assert default_journal("::1", 1).name == "journal-__1-1.sqlite3"


@pytest.mark.parametrize(
    "flags",
    [["--port", "0"], ["--journal-off"]],
)
def test_there_is_none_where_no_one_could_find_it_or_nobody_wants_it(flags, state_folder):
    assert _open_journal(load_config(flags)) is None
    assert not state_folder.exists()


def test_by_default_there_is_one_in_the_users_state_folder(state_folder):
    journal = _open_journal(load_config(["--port", "50051", "--journal-retention", "5"]))
    assert journal.path.parent == state_folder / "tidegate"
    assert journal.path.exists()


def test_a_folder_of_ones_own_is_needed_only_where_it_is_asked_for(state_folder):
    state_folder.write_text("a file where the folder should be")
    assert _open_journal(load_config(["--port", "50051"])) is None
    with pytest.raises(OSError, match="journal"):
        _open_journal(load_config(["--journal", str(state_folder / "journal")]))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--journal", "x", "--journal-off"], "journal_off"),
    ],
)
def test_contradictions_are_told(flags, named):
    with pytest.raises(ConfigError, match=named):
        load_config(flags)
