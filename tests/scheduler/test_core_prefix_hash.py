"""PrefixHasher: chained, keyed, and separate for each model, adapter and salt."""

from __future__ import annotations

import numpy as np
import pytest
from core_harness import Harness

from scheduler_service.core.prefix_hash import PrefixHasher
from scheduler_service.core.request import Prompt, Request


def tokens(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def test_only_full_blocks_are_hashed():
    hasher = PrefixHasher(b"k")
    root = hasher.root("m", "", "")
    assert len(hasher.extend(root, tokens(*range(11)), 4)) == 2
    assert hasher.extend(root, tokens(1, 2, 3), 4) == []


def test_hashes_are_16_bytes_and_chained():
    hasher = PrefixHasher(b"k")
    root = hasher.root("m", "", "")
    one, two = hasher.extend(root, tokens(1, 2, 3, 4, 1, 2, 3, 4), 4)
    assert len(one) == len(two) == 16
    assert one != two
    assert hasher.extend(one, tokens(1, 2, 3, 4), 4) == [two]


def test_a_different_first_token_changes_every_hash():
    hasher = PrefixHasher(b"k")
    root = hasher.root("m", "", "")
    a = hasher.extend(root, tokens(1, 2, 3, 4, 5, 6, 7, 8), 4)
    b = hasher.extend(root, tokens(9, 2, 3, 4, 5, 6, 7, 8), 4)
    assert not set(a) & set(b)


def test_the_key_changes_every_hash():
    a, b = PrefixHasher(b"a"), PrefixHasher(b"b")
    assert a.root("m", "", "") != b.root("m", "", "")
    assert a.extend(b"0" * 16, tokens(1), 1) != b.extend(b"0" * 16, tokens(1), 1)


@pytest.mark.parametrize(
    "other", [("n", "", ""), ("m", "a", ""), ("m", "", "a"), ("ma", "", ""), ("", "m", ""), ("", "", "m")]
)
def test_model_adapter_and_salt_each_separate_prefixes_and_never_collide(other):
    hasher = PrefixHasher(b"k")
    assert hasher.root("m", "", "") != hasher.root(*other)


def test_a_candidate_hashes_output_tokens_like_a_prompt_of_the_same_text():
    h = Harness()
    hasher = PrefixHasher(b"k")
    long = h.spec("a", [*range(23)])
    short = h.spec("b", [*range(6)])
    whole = Request(long, 0, Prompt(long, hasher), 0, 0.0)
    grown = Request(short, 0, Prompt(short, hasher), 0, 0.0)
    grown.output_ids.extend([6, 7, 8])
    grown.block_hashes(4, 2)
    grown.output_ids.extend(range(9, 23))
    assert grown.block_hashes(4, 5) == whole.block_hashes(4, 5)
    assert len(grown.block_hashes(4, 5)) == 5


def test_the_hashes_of_a_prompt_are_made_once_for_all_candidates():
    h = Harness()
    spec = h.spec("a", 20, n=3)
    prompt = Prompt(spec, PrefixHasher(b"k"))
    assert prompt.hashes(4) is prompt.hashes(4)
    candidates = [Request(spec, i, prompt, i, 0.0) for i in range(3)]
    tables = [candidate.block_hashes(4, 5) for candidate in candidates]
    assert tables[0] == tables[1] == tables[2]
    tables[0].append(b"")
    assert len(tables[1]) == 5
