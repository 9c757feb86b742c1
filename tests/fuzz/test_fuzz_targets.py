"""A few thousand inputs for each decoder of bytes from outside. `make fuzz` tries as many as one likes."""

from __future__ import annotations

import random

import pytest
from fuzz.__main__ import Run
from fuzz.target import Target, try_input
from fuzz.targets import load

NUM_INPUTS = 2000


@pytest.mark.parametrize("target", load(), ids=lambda target: target.name)
def test_wrong_inputs_are_refused_and_nothing_else_happens(target):
    rng = random.Random(f"7/{target.name}")
    tried = [try_input(target, target.make(rng), 2.0) for _ in range(int(NUM_INPUTS * target.share))]
    assert {True, False} <= set(tried)  # inputs of both kinds, or the target is not worth much


def stray(data: bytes) -> None:
    """A decoder with the faults that the runner looks for."""
    if data[0] == 1:
        raise IndexError(data)
    if data[0] == 2:
        raise ValueError(data)
    if data[0] == 3:
        while True:
            pass


def test_the_runner_finds_stray_errors_hangs_and_growth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fuzz.__main__.TIME_LIMIT_S", 0.01)
    run = Run(1, tmp_path)
    run.feed(Target("stray", lambda rng: bytes([rng.randrange(4)]), stray, (ValueError,)), 40)
    assert sorted(run.findings) == [
        "stray: HangError in target.py, stop",
        "stray: IndexError in test_fuzz_targets.py, stray",
    ]
    assert {kept.read_bytes() for kept in tmp_path.iterdir()} == {b"\1", b"\3"}
    kept: list[bytes] = []
    leaky = Target("leaky", lambda rng: b"x", lambda data: kept.append(rng_bytes()), ())
    run.feed(leaky, 50)
    assert any(finding.startswith("leaky: memory grew") for finding in run.findings)
    assert "40 inputs" in capsys.readouterr().out


def rng_bytes() -> bytes:
    return random.randbytes(1 << 20)


def test_the_same_seed_gives_the_same_inputs():
    for target in load():
        one, other = ([target.make(rng) for _ in range(20)] for rng in (random.Random(3), random.Random(3)))
        assert one == other
