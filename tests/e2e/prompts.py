"""Owns the prompts of the end-to-end tests: real text, 1 to 1,500 tokens long, in several scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = (
    "The ferry leaves at 7:45 from pier 12. Bring 3 bags, 2 tickets and 1 umbrella.",
    "海水为什么是咸的？因为河流把岩石中的盐分带入海洋，而水蒸发后盐分留了下来。",
    "Le vent se lève, il faut tenter de vivre; l'air immense ouvre et referme mon livre.",
    "Θάλασσα, θάλασσα! Пусть сильнее грянет буря. बारिश हो रही है।",
    "👩‍🚀 launched 🚀 at dawn; 👨‍👩‍👧‍👦 watched. Ẹ káàárọ̀! e\u0301 is not é.",
    "def tide(level: float) -> bool:\n    return level > 0.5  # open the gate\n\nprint(tide(0.7))\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    '{"name": "gate", "open": true, "levels": [0.1, 0.25, 0.9]}',
)

LENGTHS_TOKENS = (
    1,
    2,
    3,
    5,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    64,
    65,
    100,
    127,
    128,
    200,
    255,
    333,
    512,
    700,
    1500,
)


def texts() -> list[str]:
    """Long real texts to cut prompts from."""
    names = ("LICENSE", "docs/architecture.md", "CONTRIBUTING.md", "protos/tidegate/worker/v1/worker.proto")
    return [(ROOT / name).read_text(encoding="utf-8") for name in names]


def real_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """32 prompts as token ids, cut from real text with `encode(text) -> list of ids`."""
    streams = [encode(text) for text in texts()]
    prompts = []
    for i, length in enumerate(LENGTHS_TOKENS):
        stream = max(streams, key=len) if length > 600 else streams[i % len(streams)]
        start = (37 * i) % max(1, len(stream) - length)
        prompts.append(list(stream[start : start + length]))
    prompts += [list(encode(text)) for text in SCRIPTS]
    assert len(prompts) == 32 and max(map(len, prompts)) == 1500
    return prompts
