"""Owns the options of the journal, and where it is if nobody says so."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings


class JournalOptions(BaseSettings):
    """Options of the service about its journal."""

    journal: Path | None = Field(
        None,
        description="File that keeps accepted requests, prompts included, and their output, so that they "
        "survive a restart (unset: one in the user's state folder for host and port, unless the port is 0).",
    )
    journal_off: bool = Field(False, description="Keep no journal: nothing of requests goes to disk.")
    journal_retention: float = Field(
        600.0, ge=0, le=86_400, description="Time for which finished requests can be attached to (seconds)."
    )
    journal_max_finished: int = Field(
        10_000, ge=0, description="Most finished requests that the journal keeps (requests)."
    )

    def check_journal(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.journal is not None and self.journal_off:
            raise ValueError("journal and journal_off are both set; set one")


def default_journal(host: str, port: int) -> Path:
    """The journal of the scheduler at that address, which a restarted one finds again."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    name = "".join(character if character.isalnum() or character in ".-" else "_" for character in host)
    return Path(state) / "tidegate" / f"journal-{name}-{port}.sqlite3"
