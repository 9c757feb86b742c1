"""In fp32 the fused decoder equals transformers: logits to rounding, greedy tokens exactly."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from fused_driver import MODELS, PagedRun, make_model

from worker_service.fused.decoder import FusedDecoder


def decoder_of(model, dtype=torch.float32, threads=2):
    return FusedDecoder(copy.deepcopy(model), dtype, threads=threads)


def generate(model, prompt, count):
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_token_equal_the_plain_forward(name):
    model = make_model(name)
    tokens = torch.randint(0, 200, (150,))
    expected = model(tokens[None]).logits[0]
    run = PagedRun(decoder_of(model))
    run.add(tokens.tolist())
    pieces = [run.step({0: count}, every_token=True) for count in (1, 97, 2, 1, 49)]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=2e-4, rtol=1e-4)
    run.decoder.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_mixed_batches_generate_the_tokens_of_generate(name, block_size):
    model = make_model(name)
    choose = random.Random(block_size)
    prompts = [[choose.randrange(200) for _ in range(n)] for n in (1, 3, 17, 40, 90)]
    expected = [generate(model, prompt, 24) for prompt in prompts]
    run = PagedRun(decoder_of(model), block_size=block_size)
    for prompt in prompts:
        run.add(prompt)
    while True:
        unfinished = [r for r, tokens in enumerate(expected) if len(run.tokens[r]) < len(tokens)]
        if not unfinished:
            break
        rows = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        left = {row: len(run.tokens[row]) - run.computed[row] for row in rows}
        run.generate({row: min(count, choose.randint(1, 40)) for row, count in left.items()})
    assert run.tokens == expected
    run.decoder.close()


def test_threads_do_not_change_a_bit():
    model = make_model("llama")
    tokens = torch.randint(0, 200, (120,)).tolist()
    results = []
    for threads in (1, 2, 5):  # more than a small machine has cores: some come late, some not at all
        run = PagedRun(decoder_of(model, threads=threads))
        run.add(tokens)
        run.add(tokens[::-1])
        results.append([run.step({0: 100, 1: 7}), *(run.step({0: 1, 1: 1}) for _ in range(20))])
        run.decoder.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_batch_of_many_decodes_equals_each_alone():
    model = make_model("qwen3")
    prompts = [torch.randint(0, 200, (length,)).tolist() for length in range(60, 20, -1)]
    together = PagedRun(decoder_of(model), max_rows=40)
    for prompt in prompts:
        together.add(prompt)
    together.step({row: len(prompt) - 1 for row, prompt in enumerate(prompts)})
    logits = together.step(dict.fromkeys(range(40), 1))
    expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    together.decoder.close()


def test_chunks_without_samples_only_fill_the_cache():
    model = make_model("llama")
    tokens = torch.randint(0, 200, (60,)).tolist()
    run = PagedRun(decoder_of(model))
    run.add(tokens)
    counts = {0: 40}
    plain = run.decoder.forward

    def without_rows(ids, positions, batch, kv, logit_rows):
        return plain(ids, positions, batch, kv, logit_rows[:0])

    run.decoder.forward = without_rows
    assert run.step(counts).shape == (0, 200)
    run.decoder.forward = plain
    logits = run.step({0: 20})
    expected = model(torch.tensor([tokens])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    run.decoder.close()
