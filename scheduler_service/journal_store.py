"""Owns the journal's file: its tables, and that it is sound, private and used by one scheduler only.

It is used by one thread at a time. Tokens come as one row a step, whatever the number of requests; now and
then those rows are sorted out by candidate.
"""

# ruff: noqa: S608 - queries are put together of words of our own

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from scheduler_service.core.events import Finished
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.journal_codec import (
    READING_ERRORS,
    Acceptance,
    SavedCandidate,
    SavedRequest,
    decode_acceptance,
    decode_end,
    decode_logprobs,
    encode_acceptance,
    encode_end,
    encode_logprobs,
)

INDEX_BITS = 6  # a request has up to 64 candidates
NOT_KEPT = 0  # the number of those that the journal does not have
_FORMAT = 1
_BUSY_TIMEOUT_S = 5.0  # a scheduler that was killed may hold the file for a moment
_STEPS_TO_SORT = 512
_TABLES = """
CREATE TABLE requests(number INTEGER PRIMARY KEY, request_id TEXT NOT NULL, acceptance TEXT NOT NULL,
    prompt BLOB NOT NULL, finished_at REAL);
CREATE INDEX requests_by_id ON requests(request_id);
CREATE INDEX requests_by_end ON requests(finished_at) WHERE finished_at IS NOT NULL;
CREATE TABLE steps(step INTEGER PRIMARY KEY, candidates BLOB NOT NULL, token_ids BLOB NOT NULL);
CREATE TABLE outputs(candidate INTEGER, step INTEGER, token_ids BLOB NOT NULL, PRIMARY KEY(candidate, step))
    WITHOUT ROWID;
CREATE TABLE logprobs(candidate INTEGER, step INTEGER, logprobs TEXT NOT NULL, PRIMARY KEY(candidate, step))
    WITHOUT ROWID;
CREATE TABLE ends(candidate INTEGER PRIMARY KEY, finished TEXT NOT NULL);
"""
_OF_REQUEST = "WHERE candidate BETWEEN ? AND ?"  # see _range
_ACCESS_CODES = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
_READING_ERRORS = (sqlite3.DatabaseError, *READING_ERRORS)


class DamagedJournalError(Exception):
    """The file holds something else than a journal of this format. The message says what."""


class JournalStore:
    """An open journal. Changes between two commits are kept together or not at all.

    A candidate is a number: its request's, which is never used again, and in the last bits its index.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, readable for this user only.

        Raises:
            OSError: it cannot be used: no access, or another scheduler has it.
            DamagedJournalError: what is in it cannot be read.
        """
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise OSError(f"cannot use the journal {path}: {error}") from error
        try:
            self._set_up()
            self._db.execute("BEGIN")
            self.unfinished = self._read_unfinished()
            """What was live when the file was last written, by number."""
            self.last_epoch = self._count("SELECT max(epoch) FROM epochs")
            """The highest epoch that a worker's stream has had; 0: none."""
            self.next_number = self._count("SELECT max(number) FROM requests") + 1
            self._next_step = (
                self._count(
                    "SELECT max(step) FROM (SELECT step FROM outputs UNION ALL SELECT step FROM logprobs)"
                )
                + 1
            )
        except _READING_ERRORS as error:
            self._db.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ACCESS_CODES:
                message = f"cannot use the journal {path}: {error}; is it another scheduler's?"
                raise OSError(message) from error
            raise DamagedJournalError(f"{type(error).__name__}: {error}") from error

    def _set_up(self) -> None:
        db = self._db
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("BEGIN IMMEDIATE")  # takes the lock for as long as the file is open
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        db.execute("COMMIT")
        if not num_tables:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_FORMAT}; COMMIT;")
        elif version != _FORMAT:
            raise ValueError(f"its format is {version}, this program writes {_FORMAT}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise ValueError(verdict)
        # Files of earlier versions have none.
        db.execute("CREATE TABLE IF NOT EXISTS epochs(epoch INTEGER NOT NULL)")

    def _count(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0] or 0)

    def _read_unfinished(self) -> list[SavedRequest]:
        self._sort_out()
        rows = self._db.execute(
            "SELECT number, acceptance, prompt FROM requests WHERE finished_at IS NULL ORDER BY number"
        )
        return [self._read(*row) for row in rows.fetchall()]

    # Changes

    def accept(self, number: int, acceptance: Acceptance) -> None:
        """Notes a request that was accepted. An earlier one of its name is forgotten."""
        request_id = acceptance.spec.request_id
        earlier = self._db.execute("SELECT number FROM requests WHERE request_id=?", (request_id,))
        for (old_number,) in earlier.fetchall():
            self.forget(old_number)
        row = (number, request_id, *encode_acceptance(acceptance))
        self._db.execute("INSERT INTO requests(number, request_id, acceptance, prompt) VALUES (?,?,?,?)", row)

    def add_tokens(
        self, candidates: array[int], token_ids: array[int], logprobs: Mapping[int, TokenLogprobs] | None
    ) -> None:
        """Notes a step's tokens: candidates[i] gained token_ids[i]. `logprobs` are by row."""
        step = self._next_step
        self._next_step += 1
        self._db.execute("INSERT INTO steps VALUES (?,?,?)", (step, candidates, token_ids))
        if logprobs:
            rows = [
                (candidates[row], step, encode_logprobs(value))
                for row, value in logprobs.items()
                if candidates[row] >> INDEX_BITS != NOT_KEPT
            ]
            self._db.executemany("INSERT INTO logprobs VALUES (?,?,?)", rows)
        if step % _STEPS_TO_SORT == 0:
            self._sort_out()

    def end(self, number: int, num_candidates: int, end: Finished) -> None:
        """Notes a candidate's end, and the request's with the last one."""
        candidate = number << INDEX_BITS | end.index
        self._db.execute(
            "INSERT OR REPLACE INTO ends SELECT ?, ? WHERE EXISTS (SELECT 1 FROM requests WHERE number=?)",
            (candidate, encode_end(end), number),
        )
        query = f"SELECT count(*) FROM ends {_OF_REQUEST}"
        (num_ended,) = self._db.execute(query, _range(number)).fetchone()
        if num_ended == num_candidates:
            values = (time.time(), number)
            self._db.execute("UPDATE requests SET finished_at=? WHERE number=?", values)

    def note_epoch(self, epoch: int) -> None:
        """Notes the highest epoch."""
        self._db.execute("DELETE FROM epochs")
        self._db.execute("INSERT INTO epochs VALUES (?)", (epoch,))

    def forget(self, number: int) -> None:
        """Drops a request and all that it has."""
        for table in ("outputs", "logprobs", "ends"):
            query = f"DELETE FROM {table} {_OF_REQUEST}"
            self._db.execute(query, _range(number))
        self._db.execute("DELETE FROM requests WHERE number=?", (number,))

    def prune(self, retention_s: float, max_finished: int) -> None:
        """Forgets requests that finished more than `retention_s` ago, and all but the last `max_finished`."""
        old = self._db.execute(
            "SELECT number FROM requests WHERE finished_at < ? UNION SELECT number FROM (SELECT number FROM "
            "requests WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT -1 OFFSET ?)",
            (time.time() - retention_s, max_finished),
        )
        for (number,) in old.fetchall():
            self.forget(number)

    def commit(self) -> None:
        """Keeps all changes so far, whatever happens to this process."""
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")

    def close(self) -> None:
        """Commits and closes."""
        self._db.execute("COMMIT")
        self._db.close()

    # Reading

    def find(self, request_id: str) -> SavedRequest | None:
        """The request of that name, if it is known."""
        query = "SELECT number, acceptance, prompt FROM requests WHERE request_id=?"
        row = self._db.execute(query, (request_id,)).fetchone()
        return None if row is None else self._read(*row)

    def _read(self, number: int, acceptance_json: str, prompt: bytes) -> SavedRequest:
        acceptance = decode_acceptance(acceptance_json, prompt)
        request_id = acceptance.spec.request_id
        tokens: dict[int, list[int]] = {}
        query = f"SELECT candidate, token_ids FROM outputs {_OF_REQUEST} ORDER BY candidate, step"
        for candidate, token_ids in self._db.execute(query, _range(number)):
            tokens.setdefault(candidate, []).extend(np.frombuffer(token_ids, "<i4").tolist())
        for step in self._db.execute("SELECT candidates, token_ids FROM steps ORDER BY step"):
            candidates, ids = _columns(*step)
            mine = (candidates >> INDEX_BITS) == number
            for candidate, token_id in zip(candidates[mine].tolist(), ids[mine].tolist(), strict=True):
                tokens.setdefault(candidate, []).append(token_id)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        query = f"SELECT candidate, logprobs FROM logprobs {_OF_REQUEST} ORDER BY candidate, step"
        for candidate, text in self._db.execute(query, _range(number)):
            logprobs.setdefault(candidate, []).append(decode_logprobs(text))
        query = f"SELECT candidate, finished FROM ends {_OF_REQUEST}"
        ends = dict(self._db.execute(query, _range(number)).fetchall())
        saved = []
        for index in range(acceptance.spec.n):
            key = number << INDEX_BITS | index
            end = decode_end(request_id, index, ends[key]) if key in ends else None
            saved.append(SavedCandidate(tokens.get(key, []), logprobs.get(key, []), end))
        return SavedRequest(number, acceptance, tuple(saved))

    def _sort_out(self) -> None:
        """Moves the tokens of all steps to their candidates; those of forgotten requests go."""
        steps = self._db.execute("SELECT step, candidates, token_ids FROM steps ORDER BY step").fetchall()
        if not steps:
            return
        columns = [_columns(candidates, ids) for _, candidates, ids in steps]
        candidates = np.concatenate([column for column, _ in columns])
        token_ids = np.concatenate([column for _, column in columns])
        order = np.argsort(candidates, kind="stable")
        candidates, token_ids = candidates[order], token_ids[order]
        starts = np.flatnonzero(np.diff(candidates, prepend=-1))
        known = {number for (number,) in self._db.execute("SELECT number FROM requests")}
        first_step = steps[0][0]
        rows = [
            (candidate, first_step, token_ids[start:end].tobytes())
            for candidate, (start, end) in zip(
                candidates[starts].tolist(),
                itertools.pairwise([*starts.tolist(), len(candidates)]),
                strict=True,
            )
            if candidate >> INDEX_BITS in known
        ]
        self._db.executemany("INSERT INTO outputs VALUES (?,?,?)", rows)
        self._db.execute("DELETE FROM steps")


def set_aside(path: Path) -> Path:
    """Renames a journal that cannot be read, so that people can look at it. Returns the new name."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):
        part = Path(f"{path}{suffix}")
        if part.exists():
            part.rename(f"{aside}{suffix}")
    return aside


def _range(number: int) -> tuple[int, int]:
    """The first and the last candidate of a request."""
    return number << INDEX_BITS, (number + 1 << INDEX_BITS) - 1


def _columns(candidates: bytes, token_ids: bytes) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    columns = np.frombuffer(candidates, "<i8"), np.frombuffer(token_ids, "<i4")
    if len(columns[0]) != len(columns[1]):
        raise ValueError(f"a step has {len(columns[0])} candidates and {len(columns[1])} tokens")
    return columns
