"""The benchmark's arithmetic: exact workloads, arrivals, percentiles, goodput."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tidegate_client.bench.errors import PlanError
from tidegate_client.bench.figures import Objective, Spread, summarize
from tidegate_client.bench.load import OpenLoop
from tidegate_client.bench.passage import Passage
from tidegate_client.bench.prompts import TokenIds, Words
from tidegate_client.bench.workload import PRESETS, Lengths, Request, Shape, from_file

IDS = TokenIds(49152)


def rng() -> random.Random:
    return random.Random(1)


def shapes(name: str) -> Counter[tuple[int, int]]:
    sessions = PRESETS[name].build(rng(), IDS)
    return Counter((len(request.prompt), request.output_tokens) for (request,) in sessions)


def test_presets_have_exact_counts() -> None:
    assert shapes("w1") == {(128, 128): 5}
    assert shapes("w2") == {(64, 64): 64}
    assert shapes("w3") == {(1000, 32): 24, (32, 128): 24}
    assert shapes("w4") == {(832, 32): 48}
    assert [preset.concurrency for preset in PRESETS.values()] == [1, 16, 16, 8]


def test_only_the_prefix_of_w4_is_shared() -> None:
    prompts = [request.prompt for (request,) in PRESETS["w4"].build(rng(), IDS)]
    assert len({tuple(prompt[:802]) for prompt in prompts}) == 1
    assert len({tuple(prompt[802:]) for prompt in prompts}) == 48
    others = [request.prompt for (request,) in PRESETS["w2"].build(rng(), IDS)]
    assert len({tuple(prompt[:4]) for prompt in others}) == 64


def test_prompts_avoid_special_tokens_and_stay_in_the_vocabulary() -> None:
    assert set(TokenIds(300).extend(rng(), None, 2000)) == set(range(150, 300))


def test_lengths_are_drawn_from_the_whole_range_and_no_further() -> None:
    sessions = Shape(400, Lengths.parse("3:7"), Lengths.parse("2")).build(rng(), IDS)
    assert {len(request.prompt) for (request,) in sessions} == {3, 4, 5, 6, 7}
    assert {request.output_tokens for (request,) in sessions} == {2}
    for wrong in ("0", "7:3", "x", ""):
        with pytest.raises(ValueError):
            Lengths.parse(wrong)


def test_prefixes_are_dealt_out_in_turn_and_come_before_the_first_turn_only() -> None:
    shape = Shape(6, Lengths(4, 4), Lengths(1, 1), turns=2, prefix_tokens=10, prefixes=3)
    sessions = shape.build(rng(), IDS)
    assert [[len(request.prompt) for request in session] for session in sessions] == [[14, 4]] * 6
    beginnings = [tuple(session[0].prompt[:10]) for session in sessions]
    assert beginnings[:3] == beginnings[3:]
    assert len(set(beginnings)) == 3


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with a BOS token, as real ones are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(
        ["the tide gate lets water in by its level and the tide turns"] * 9, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_text_prompts_have_exactly_the_tokens_that_the_tokenizer_counts(tokenizer_file: Path) -> None:
    words = Words.from_file(tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    for count in (1, 2, 50, 333):
        prompt = words.extend(rng(), None, count)
        assert len(tokenizer.encode(prompt).ids) == count  # BOS is one of them
        longer = words.extend(rng(), prompt, 40)
        assert longer.startswith(prompt)
        assert words.count(longer) == count + 40


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(PlanError, match=r"t\.json can't be read as a tokenizer\.json"):
        Words.from_file(tmp_path / "t.json")


def test_prompts_are_read_from_lines_and_from_json_lines(tmp_path: Path) -> None:
    plain, rich = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("One\n\nTwo\nThree\n")
    rich.write_text("\n".join(map(json.dumps, [{"prompt": "Hi", "output_tokens": 3}, {"turns": ["a", "b"]}])))
    workload = from_file(plain, Lengths(5, 5), 16, most=2)
    assert workload.build(rng(), IDS) == [[Request("One", 5)], [Request("Two", 5)]]
    workload = from_file(rich, Lengths(5, 5), 16, most=None)
    assert workload.build(rng(), IDS) == [[Request("Hi", 3)], [Request("a", 5), Request("b", 5)]]


@pytest.mark.parametrize("content", ["", '{"text": "x"}', "[1]", '{"turns": []}', "{", '{"prompt": ""}'])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(PlanError, match=r"p\.jsonl"):
        from_file(tmp_path / "p.jsonl", Lengths(5, 5), 16, most=None)


def test_arrivals_come_at_the_rate_and_bursts_vary_more() -> None:
    def gaps(burstiness: float) -> list[float]:
        arrivals = OpenLoop(4.0, burstiness).arrivals_s(rng(), 20_000)
        return [after - before for before, after in itertools.pairwise(arrivals)]

    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(burstiness)
        mean = sum(found) / len(found)
        variance = sum((gap - mean) ** 2 for gap in found) / len(found)
        assert mean == pytest.approx(0.25, rel=0.05)
        # A gamma distribution's squared coefficient of variation is 1 / shape.
        assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def passage(start: float = 1.0, *, error: str = "") -> Passage:
    if error:
        return Passage.failed(start, start + 0.1, error, "no")
    arrivals = (start + 0.5, start + 0.75, start + 1.25)
    return Passage(start, start + 1.5, arrivals, (1, 1, 2), prompt_tokens=7, cached_tokens=3, output_tokens=4)


def test_tokens_of_one_message_share_its_gap() -> None:
    one = passage()
    assert one.time_to_first_token_s() == 0.5
    assert one.gaps_s() == [0.25, 0.25, 0.25]
    assert one.time_per_output_token_s() == 0.25
    assert one.end_to_end_s() == 1.5


def test_a_spread_is_in_milliseconds_and_interpolates() -> None:
    spread = Spread.of([0.006, 0.001, 0.002])
    assert spread == Spread(3.0, 2.0, pytest.approx(5.2), pytest.approx(5.92))
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_failed_requests_count_as_such_and_in_no_latency() -> None:
    figures = summarize(
        [passage(1.0), passage(2.0), passage(2.0, error="HTTP 429"), passage(2.0, error="HTTP 429")],
        1.0,
        Objective.parse(["ttft=500", "e2e=1600"]),
    )
    assert (figures.requests, figures.errors) == (4, {"HTTP 429": 2})
    assert figures.duration_s == 2.5
    assert figures.output_tokens_per_s == 8 / 2.5
    assert figures.requests_per_s == 2 / 2.5
    assert (figures.prompt_tokens, figures.cached_tokens) == (14, 6)
    assert figures.ttft.p99_ms == 500
    assert (figures.goodput_per_s, figures.good_share) == (2 / 2.5, 0.5)


@pytest.mark.parametrize(
    ("limit", "good"), [("ttft=499", 0), ("itl=250", 1), ("itl=249", 0), ("tpot=249", 0), ("e2e=1500", 1)]
)
def test_a_request_is_good_if_it_keeps_each_limit(limit: str, good: int) -> None:
    assert summarize([passage(0.0)], 0.0, Objective.parse([limit, "e2e=9999"])).good_share == good


def test_without_an_objective_there_is_no_goodput() -> None:
    assert summarize([passage()], 1.0, None).goodput_per_s is None


@pytest.mark.parametrize("text", ["ttft", "tft=5", "ttft=", "ttft=-1", "ttft=x"])
def test_an_objective_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Objective.parse([text])
