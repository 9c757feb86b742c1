"""Rows that begin with the same blocks: who shares what, and logits equal to each sequence alone."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from fused_driver import MODELS, PagedRun, make_model

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.fused import prefixes
from worker_service.fused.decoder import FusedDecoder

BLOCK = 16


def batch_of(tables, seq_lens, counts):
    width = max(len(table) for table in tables)
    padded = np.zeros((len(tables), width), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return AttentionBatch.from_host(
        starts, np.array(seq_lens, np.int32), padded, np.zeros(starts[-1], np.int64)
    )


def grow_tables(choose, rows):
    """Block tables of a random tree: a row goes on from some blocks of an earlier one."""
    tables, fresh = [], iter(range(1, 10_000))
    for _ in range(rows):
        parent = choose.choice(tables) if tables and choose.random() < 0.8 else []
        kept = parent[: choose.randint(0, len(parent))]
        tables.append(kept + [next(fresh) for _ in range(choose.randint(1, 20))])
    choose.shuffle(tables)
    return tables


@pytest.mark.parametrize("seed", range(40))
def test_units_cover_equal_blocks_of_their_rows_and_leave_no_gap(seed):
    choose = random.Random(seed)
    tables = grow_tables(choose, choose.randint(2, 70))
    seq_lens = [BLOCK * len(table) - choose.randrange(BLOCK) for table in tables]
    counts = [min(choose.choice([1, 1, 1, 2, 7, 40]), length) for length in seq_lens]
    batch = batch_of(tables, seq_lens, counts)
    found = prefixes.find(batch, BLOCK, 32, kv_heads=3)
    if found is None:
        return
    columns = found.columns(len(tables))
    starts = batch.query_starts_host
    for row, table in enumerate(tables):
        parts = range(columns["part_starts"][row], columns["part_starts"][row + 1])
        reached = 0
        for part in parts:
            unit, place = columns["part_units"][part], columns["part_tokens"][part]
            start, end = columns["prefix_starts"][unit], columns["prefix_ends"][unit]
            assert start == reached
            assert end > start
            other = tables[columns["prefix_rows"][unit]]
            blocks = slice(start // BLOCK, end // BLOCK)
            assert table[blocks] == other[blocks]
            first = columns["prefix_firsts"][unit] + place
            assert place + counts[row] <= columns["prefix_counts"][unit] <= 32
            tokens = columns["prefix_tokens"][first : first + counts[row]]
            assert tokens.tolist() == list(range(starts[row], starts[row + 1]))
            reached = end
        assert reached == columns["prefix_lengths"][row] <= seq_lens[row] - counts[row]
    sizes = columns["prefix_counts"]
    assert columns["prefix_states"].tolist() == [0, *np.cumsum(sizes)[:-1]]


def test_all_that_two_levels_share_is_found():
    common, left, right = list(range(1, 11)), list(range(11, 31)), list(range(31, 51))
    tables = [common + branch + [100 + row] for row, branch in enumerate([left, right, left, right, left])]
    found = prefixes.find(batch_of(tables, [BLOCK * 31] * 5, [1] * 5), BLOCK, 32, kv_heads=3)
    columns = found.columns(5)
    assert columns["prefix_lengths"].tolist() == [BLOCK * 30] * 5
    by_rows = {}
    for start, end, count in zip(found.starts, found.ends, found.counts, strict=True):
        by_rows[count] = by_rows.get(count, 0) + end - start
    assert by_rows == {5: 160, 3: 320, 2: 320}


def test_what_does_not_pay_is_left_to_the_rows():
    alone = [list(range(100 * row + 1, 100 * row + 21)) for row in range(4)]
    assert prefixes.find(batch_of(alone, [310] * 4, [1] * 4), BLOCK, 32, 3) is None
    short = [[1, 2, 3, 4, 5, 6, 7, 10 + row] for row in range(4)]
    assert prefixes.find(batch_of(short, [120] * 4, [1] * 4), BLOCK, 32, 3) is None
    same = [[*list(range(1, 20)), 50 + row] for row in range(4)]
    assert prefixes.find(batch_of(same, [310] * 4, [17] * 4), BLOCK, 32, 3) is None
    assert prefixes.find(batch_of(same, [310] * 4, [1, 17, 17, 17]), BLOCK, 32, 3) is None
    assert prefixes.find(batch_of(same, [310] * 4, [1] * 4), BLOCK, 1, 3) is None
    assert prefixes.find(batch_of(same, [310] * 4, [1, 17, 1, 17]), BLOCK, 32, 3) is not None


def test_long_rows_are_cut_into_ranges_where_rows_are_few():
    one = [list(range(1, 65))]
    found = prefixes.find(batch_of(one, [1020], [1]), BLOCK, 32, 3)
    assert list(zip(found.starts, found.ends, strict=True)) == [(n, n + 144) for n in range(0, 1008, 144)]
    assert found.columns(1)["prefix_lengths"].tolist() == [1008]
    assert prefixes.find(batch_of(one, [1020], [17]), BLOCK, 32, 3) is None
    assert prefixes.find(batch_of([one[0][:48]], [767], [1]), BLOCK, 32, 3) is None
    two = [[*range(100, 120)], *one]
    found = prefixes.find(batch_of(two, [310, 1020], [1, 9]), BLOCK, 32, 3)
    assert [row for row, _, _ in found.parts] == [1] * 7
    assert found.columns(2)["prefix_lengths"].tolist() == [0, 1008]
    assert prefixes.find(batch_of(two, [310, 1020], [1, 9]), BLOCK, 32, 5) is None


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_long_row_alone_equal_the_plain_forward(name):
    torch.manual_seed(4)
    family = Family(make_model(name), max_rows=2, max_tokens=900)
    long, short = family.add(840), family.add(40)
    family.run.step({long: 800})
    family.expect_equal({long: 1})
    family.expect_equal({long: 3, short: 30})
    family.expect_equal({long: 1, short: 1})
    family.run.decoder.close()


def test_many_rows_are_packed_evenly_and_a_row_stays_whole():
    same = [[*list(range(1, 20)), 50 + row] for row in range(40)]
    found = prefixes.find(batch_of(same, [310] * 40, [1] * 40), BLOCK, 32, 3)
    assert set(found.counts) == {20}
    assert [b - a for a, b in pairwise([*sorted(set(found.starts)), 304])] == [144, 160]


class Family:
    """Sequences of a paged run that share their first blocks, as a prefix cache would have it."""

    def __init__(self, model, **settings):
        self.model = model
        self.run = PagedRun(FusedDecoder(copy.deepcopy(model), torch.float32, threads=2), **settings)

    def add(self, length, parent=None, blocks=0):
        shared = self.run.tokens[parent][: blocks * self.run.block_size] if parent is not None else []
        row = self.run.add(shared + torch.randint(0, 200, (length,)).tolist())
        if parent is not None:
            self.run.tables[row, :blocks] = self.run.tables[parent, :blocks]
            self.run.computed[row] = len(shared)
        return row

    def expect_equal(self, counts):
        """A step's logits equal the plain forward's."""
        logits = self.run.step(counts)
        for row, actual in zip(counts, logits, strict=True):
            known = torch.tensor([self.run.tokens[row][: self.run.computed[row]]])
            expected = self.model(known).logits[0, -1]
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_over_shared_blocks_equal_each_sequence_alone(name):
    torch.manual_seed(3)
    family = Family(make_model(name), max_rows=12, max_tokens=400)
    root = family.add(150)
    family.run.step({root: 145})
    rows = [family.add(12, root, 9) for _ in range(4)]
    branch = family.add(180, root, 8)
    family.run.step({branch: 175})
    rows += [family.add(20, branch, 18) for _ in range(5)]
    stranger = family.add(60)
    family.expect_equal({**dict.fromkeys(rows, 1), root: 2, branch: 1, stranger: 50})
    family.expect_equal({**dict.fromkeys(rows, 3), rows[2]: 11, root: 1, branch: 1, stranger: 1})
    family.expect_equal(dict.fromkeys([*rows[:2], *rows[3:]], 1))
    family.run.decoder.close()


@pytest.mark.parametrize("seed", range(4))
def test_logits_of_random_families_equal_each_sequence_alone(seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    block_size = choose.choice([8, 16, 32])
    family = Family(make_model("qwen3"), max_rows=14, max_tokens=480, block_size=block_size)
    for _ in range(14):
        row = family.add(choose.randint(30, 120))
        if row:
            parent = choose.randrange(row)
            full = family.run.computed[parent] // block_size
            family.run.tokens.pop()
            family.run.computed.pop()
            row = family.add(
                choose.randint(30, 60), parent, min(full, choose.choice([full, full, full // 2]))
            )
        family.run.step({row: len(family.run.tokens[row]) - family.run.computed[row] - 20})
    for _ in range(4):
        rows = choose.sample(range(14), choose.randint(8, 14))
        family.expect_equal({row: choose.choice([1, 1, 1, 2, 4]) for row in rows})
    family.run.decoder.close()


def test_threads_do_not_change_a_bit_of_shared_attention():
    model = make_model("llama")
    results = []
    for threads in (1, 2, 5):
        torch.manual_seed(5)
        family = Family(model, max_rows=9, max_tokens=400)
        family.run.decoder.close()
        family.run.decoder = FusedDecoder(copy.deepcopy(model), torch.float32, threads=threads)
        root = family.add(320)
        family.run.step({root: 310})
        rows = [family.add(6, root, 18) for _ in range(8)]
        results.append(torch.stack([family.run.step(dict.fromkeys(rows, 1)) for _ in range(5)]))
        family.run.decoder.close()
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_step_says_in_its_profile_whether_rows_shared_keys():
    family = Family(make_model("mistral-window"), max_rows=3, max_tokens=256)
    root = family.add(200)
    family.run.step({root: 199})
    rows = [family.add(5, root, 10) for _ in range(2)]
    family.run.step(dict.fromkeys(rows, 1))
    assert "attention over ranges" not in family.run.decoder.profile()  # its window ends before
    family.run.decoder.close()
    family = Family(make_model("llama"), max_rows=3, max_tokens=256)
    root = family.add(200)
    family.run.step({root: 199})
    rows = [family.add(5, root, 10) for _ in range(2)]
    family.run.step(dict.fromkeys(rows, 1))
    shares = family.run.decoder.profile()
    assert shares["attention over ranges"] > 0
    assert sum(shares.values()) == pytest.approx(1.0)
    family.run.decoder.close()
