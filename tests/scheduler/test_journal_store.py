"""The journal's file: what comes back, what is dropped, and what becomes of a file that is no journal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import stat
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_harness import spec

from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import Acceptance, SavedRequest
from scheduler_service.journal_store import DamagedJournalError, JournalStore
from scheduler_service.presentation import Presentation


def acceptance(request_id: str, **fields) -> Acceptance:
    return Acceptance(spec(request_id, None, **fields), Presentation(), "fp-1", None)


def end(request_id: str, index: int = 0, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(
        request_id, index, reason, None, Usage(10, 4, 3, 1), Timings(0.5, 0.25, 2.0, 0.0, None), "why"
    )


def add(store: JournalStore, candidates: list[tuple[int, int]], tokens: list[int], logprobs=None) -> None:
    store.add_tokens(
        array("q", [number << 6 | index for number, index in candidates]), array("i", tokens), logprobs
    )


def reopened(store: JournalStore, path: Path) -> JournalStore:
    store.close()
    return JournalStore(path)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def store(path: Path):
    store = JournalStore(path)
    yield store


def test_a_request_comes_back_as_it_was_accepted(store, path):
    given = Acceptance(
        spec(
            "r",
            None,
            sampling=SamplingParams(
                temperature=0.7, top_k=5, seed=2**64 - 1, logit_bias=((3, -1.5), (9, 2.0)), logprobs=2
            ),
            stopping=StoppingParams(9, 2, frozenset({1, 2}), frozenset({7})),
            n=3,
            priority=-4,
            tenant="t",
            cache_salt="s",
            queue_timeout_s=1.5,
        ),
        Presentation(text=True, token_ids=False, skip_special_tokens=False, stop=("a\n", "é")),
        "fp-1",
        1e9 + 0.25,
    )
    store.accept(1, given)
    (saved,) = reopened(store, path).unfinished
    back = saved.acceptance
    assert (back.presentation, back.fingerprint, back.deadline_at) == (given.presentation, "fp-1", 1e9 + 0.25)
    assert back.spec.prompt_token_ids.tolist() == given.spec.prompt_token_ids.tolist()
    names = ("sampling", "stopping", "n", "priority", "tenant", "cache_salt", "queue_timeout_s", "model")
    for name in names:
        assert getattr(back.spec, name) == getattr(given.spec, name), name


def test_a_deadline_moves_to_the_new_clock(store):
    given = acceptance("r")
    saved = SavedRequest(1, Acceptance(given.spec, Presentation(), "fp", time.time() + 30), ())
    assert saved.spec(1000.0, None).deadline == pytest.approx(1030.0, abs=1.0)


def test_tokens_of_many_steps_come_back_by_candidate_in_order(store, path):
    """As many steps as are sorted out several times, in two lives of the process."""
    rng = random.Random(5)
    expected: dict[tuple[int, int], list[int]] = {(n, i): [] for n in (1, 2, 3) for i in range(2)}
    for number in (1, 2, 3):
        store.accept(number, acceptance(f"r{number}", n=2))
    for step in range(1200):
        if step == 700:
            store = reopened(store, path)
        chosen = rng.sample(sorted(expected), rng.randint(1, 6))
        tokens = [rng.randrange(1000) for _ in chosen]
        add(store, chosen, tokens)
        for candidate, token in zip(chosen, tokens, strict=True):
            expected[candidate].append(token)
    before = [store.find(f"r{number}") for number in (1, 2, 3)]
    after = reopened(store, path).unfinished
    for requests in (before, after):
        for number, saved in enumerate(requests, start=1):
            assert [list(c.token_ids) for c in saved.candidates] == [expected[number, 0], expected[number, 1]]


def test_log_probabilities_come_back_with_their_tokens(store):
    store.accept(1, acceptance("a"))
    store.accept(2, acceptance("b"))
    values = [TokenLogprobs(-0.5, ((4, -0.25), (5, -3.0))), TokenLogprobs(-1.0, ())]
    add(store, [(1, 0), (2, 0)], [4, 5], {1: values[0]})
    add(store, [(2, 0)], [6], {0: values[1]})
    assert store.find("b").candidates[0].logprobs == values
    assert store.find("a").candidates[0].logprobs == []


def test_only_requests_with_a_live_candidate_are_unfinished(store, path):
    for number, request_id in enumerate(("done", "half", "new"), start=1):
        store.accept(number, acceptance(request_id, n=2))
    for index in range(2):
        store.end(1, 2, end("done", index))
    store.end(2, 2, end("half", 1, FinishReason.STOP))
    store = reopened(store, path)
    assert [saved.request_id for saved in store.unfinished] == ["half", "new"]
    assert [c.end for c in store.unfinished[0].candidates] == [None, end("half", 1, FinishReason.STOP)]
    assert store.find("done").finished
    assert store.next_number == 4


def test_what_was_not_committed_is_not_there(store, path):
    store.accept(1, acceptance("r"))
    add(store, [(1, 0)], [5])
    store.commit()
    add(store, [(1, 0)], [6])
    store._db.close()  # as if the process had been killed
    (saved,) = JournalStore(path).unfinished
    assert list(saved.candidates[0].token_ids) == [5]


def test_a_name_that_is_used_again_is_the_new_request(store):
    store.accept(1, acceptance("r"))
    add(store, [(1, 0)], [5])
    store.end(1, 1, end("r"))
    store.accept(2, acceptance("r"))
    saved = store.find("r")
    assert (saved.number, saved.finished, list(saved.candidates[0].token_ids)) == (2, False, [])


def test_nothing_is_left_of_a_request_that_was_forgotten(store, path):
    store.accept(1, acceptance("r"))
    add(store, [(1, 0)], [5], {0: TokenLogprobs(-1.0, ())})
    store.forget(1)
    add(store, [(0, 0)], [6], {0: TokenLogprobs(-1.0, ())})
    store.end(1, 1, end("r"))
    store = reopened(store, path)
    assert store.find("r") is None
    for table in ("requests", "steps", "outputs", "logprobs", "ends"):
        assert store._count(f"SELECT count(*) FROM {table}") == 0, table


def test_finished_requests_go_by_age_and_by_number(store):
    for number in range(1, 6):
        store.accept(number, acceptance(f"r{number}"))
        if number < 5:
            store.end(number, 1, end(f"r{number}"))
    store._db.execute("UPDATE requests SET finished_at = finished_at - 100 WHERE number = 1")
    store.prune(retention_s=50.0, max_finished=2)
    known = [number for number in range(1, 6) if store.find(f"r{number}")]
    assert known == [3, 4, 5]


def test_the_file_is_for_its_user_alone_and_one_scheduler(store, path, monkeypatch):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr("scheduler_service.journal_store._BUSY_TIMEOUT_S", 0.05)
    with pytest.raises(OSError, match="another scheduler"):
        JournalStore(path)


def test_a_folder_that_does_not_let_us_write_is_told(tmp_path):
    with pytest.raises(OSError, match="cannot use the journal"):
        JournalStore(tmp_path / "missing" / "journal")


def damage_bytes(path: Path) -> None:
    path.write_bytes(b"no journal at all" * 100)


def damage_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)


def damage_row(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE requests SET acceptance = '{}'")


def damage_format(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 77")


@pytest.mark.parametrize("damage", [damage_bytes, damage_page, damage_row, damage_format])
async def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(store, path, damage):
    store.accept(1, acceptance("r", prompt=400))
    store.close()
    Path(f"{path}-wal").unlink(missing_ok=True)
    damage(path)
    content = path.read_bytes()
    with pytest.raises(DamagedJournalError):
        JournalStore(path)
    journal = Journal(path, 600.0, 100)
    assert journal.unfinished == []
    (aside,) = path.parent.glob("journal.damaged-*[0-9]")
    if damage is not damage_format and damage is not damage_row:
        assert aside.read_bytes() == content
    journal.start()
    journal.accept(acceptance("after"))
    journal.close()
    assert [saved.request_id for saved in JournalStore(path).unfinished] == ["after"]


def test_random_damage_never_does_more_than_that(store, path):
    """Every byte that is changed is found out, or does not matter."""
    for number in range(1, 30):
        store.accept(number, acceptance(f"r{number}", prompt=50))
        add(store, [(number, 0)], [number])
    store.close()
    sound = path.read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(150):
        data = np.frombuffer(sound, np.uint8).copy()
        where = rng.integers(0, len(data), 8)
        data[where] = rng.integers(0, 256, 8)
        path.write_bytes(data.tobytes())
        with contextlib.suppress(DamagedJournalError):
            JournalStore(path).close()
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


async def test_tickets_come_back_once_their_changes_are_kept(path):
    journal = Journal(path, 600.0, 100)
    tickets: list[int] = []
    journal.on_commit = tickets.append
    journal.start()
    journal.accept(acceptance("r"))
    journal.add_tokens(array("q", [1 << 6]), array("i", [5]), None)
    last = journal.last_ticket
    await until(lambda: tickets and tickets[-1] >= last)
    assert tickets == sorted(tickets)
    assert tickets[-1] == last
    saved = await journal.find("r")
    assert list(saved.candidates[0].token_ids) == [5]
    assert await journal.find("other") is None
    journal.close()


async def test_a_journal_that_cannot_be_written_is_given_up_and_holds_nobody_up(path, caplog):
    journal = Journal(path, 600.0, 100)
    tickets: list[int] = []
    journal.on_commit = tickets.append
    journal.start()
    journal._put(lambda store: store._db.execute("INSERT INTO nowhere VALUES (1)"))
    journal.accept(acceptance("r"))
    await until(lambda: tickets and tickets[-1] >= 2)
    assert await journal.find("r") is None
    journal.close()
