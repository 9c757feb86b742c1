"""How far bf16 and int8 weights may take the demo model from fp32, over 32 prompts."""

import pytest

from benchmarks import precision

NEW_TOKENS = 16
# Most mean KL in nats, fewest positions with the same likeliest token, fewest whole texts that are the same.
# docs/workers.md has what was measured.
BOUNDS = {"bfloat16": (1e-4, 0.99, 31), "int8": (1e-2, 0.93, 12)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_types_stay_within_their_bounds():
    distances = precision.measure(NEW_TOKENS, threads=1)
    assert distances.keys() == BOUNDS.keys()
    for name, (mean_kl, agreeing, whole_texts) in BOUNDS.items():
        distance = distances[name]
        assert len(distance.partings) == 32
        assert 0 < distance.mean_kl < mean_kl
        assert distance.agreeing > agreeing
        assert distance.unparted(NEW_TOKENS) >= whole_texts
