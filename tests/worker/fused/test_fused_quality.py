"""What bf16 and int8 weights change, and that nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_driver import PagedRun, make_model
from torch import nn

from worker_service.fused.decoder import FusedDecoder
from worker_service.fused.packing import quantize
from worker_service.fused.tile import KERNELS

# Where the processor multiplies bf16 pairs, activations are rounded to bf16 as well.
ROUNDS_ACTIVATIONS = KERNELS["uint16"].name == "bf16_dot"

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Write a short story about a lighthouse keeper who finds a message in a bottle. The keeper",
    "Once upon a time",
    "In 1969, the first humans landed on the Moon. The mission was called Apollo 11, and its crew",
    "Q: What is 17 + 25?\nA:",
]
NEW_TOKENS = 24


def rounded(model, dtype):
    """The model with its matrices' weights as the decoder keeps them, in fp32."""
    model = copy.deepcopy(model)
    tied = model.config.tie_word_embeddings
    embedding = model.model.embed_tokens
    for module in model.modules():
        if isinstance(module, nn.Linear) and dtype == torch.int8:
            weight, scales = quantize(module.weight.data)
            module.weight.data.copy_(weight * scales[:, None])
        elif isinstance(module, nn.Linear):
            module.weight.data.copy_(module.weight.data.to(dtype).float())
    if not tied:
        embedding.weight.data.copy_(embedding.weight.data.bfloat16().float())
    return model


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 0.2 if ROUNDS_ACTIVATIONS else 2e-4), (torch.int8, 5e-3)],
)
def test_weights_are_rounded_and_nothing_else(name, dtype, tolerance):
    model = make_model(name)
    tokens = torch.randint(0, 200, (75,))
    expected = rounded(model, dtype)(tokens[None]).logits[0]
    run = PagedRun(FusedDecoder(copy.deepcopy(model), dtype, threads=2))
    run.add(tokens.tolist())
    logits = torch.cat([run.step({0: count}, every_token=True) for count in (64, 1, 2, 8)])
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=1e-3)
    run.decoder.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_bf16_cache_rounds_keys_and_values_alone(dtype):
    model = make_model("llama")
    tokens = torch.randint(0, 200, (100,)).tolist()
    plain, small = (
        PagedRun(FusedDecoder(copy.deepcopy(model), dtype, threads=2), kv_dtype=kv)
        for kv in (torch.float32, torch.bfloat16)
    )
    for run in (plain, small):
        run.add(tokens)
    for counts in ({0: 70}, {0: 1}, {0: 29}):
        expected, logits = plain.step(counts), small.step(counts)
        assert 0 < (logits - expected).abs().max() < 0.1
        assert torch.equal(
            small.kv[0][0].float().nan_to_num(), plain.kv[0][0].bfloat16().float().nan_to_num()
        )
    for run in (plain, small):
        run.decoder.close()


def test_a_zero_row_and_a_broken_row_stay_what_they_are_in_int8():
    model = make_model("llama")
    model.model.embed_tokens.weight.data[5] = 0.0
    model.model.embed_tokens.weight.data[6] = torch.nan
    run = PagedRun(FusedDecoder(model, torch.int8, threads=1))
    run.add([5])
    run.add([6])
    logits = run.step({0: 1, 1: 1})
    assert logits[0].abs().max() == 0.0  # no bias anywhere: nothing comes of nothing
    assert logits[1].isnan().all()
    run.decoder.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mean_kl", "all_agree_for"), [(torch.bfloat16, 2e-3, 8), (torch.int8, 2e-2, 1)]
)
def test_the_demo_model_stays_close_to_fp32(dtype, mean_kl, all_agree_for):
    """Mean KL against fp32 over prompts and continuations, and how long greedy texts agree with fp32's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from worker_service import demo_model

    folder = demo_model.prepare()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = continue_greedily(
        FusedDecoder(copy.deepcopy(model), torch.float32, threads=2), prompts, torch.float32
    )
    with torch.inference_mode():
        expected = [model(torch.tensor([tokens])).logits[0].log_softmax(-1) for tokens in exact]

    decoder = FusedDecoder(model, dtype, threads=2)
    texts = continue_greedily(decoder, prompts, torch.bfloat16)
    run = PagedRun(decoder, kv_dtype=torch.bfloat16)
    divergences = []
    for tokens, reference in zip(exact, expected, strict=True):
        row = run.add(tokens)
        logits = run.step({row: len(tokens)}, every_token=True).log_softmax(-1)
        divergences.append((reference.exp() * (reference - logits)).sum(-1))
    decoder.close()
    assert torch.cat(divergences).mean() < mean_kl
    agreeing = [
        next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), len(text)) - len(prompt)
        for prompt, text, other in zip(prompts, exact, texts, strict=True)
    ]
    assert sorted(agreeing)[1] >= all_agree_for  # one prompt may hit a near tie


def continue_greedily(decoder, prompts, kv_dtype):
    """NEW_TOKENS more tokens of each prompt."""
    run = PagedRun(decoder, kv_dtype=kv_dtype, max_tokens=128)
    for prompt in prompts:
        run.add(prompt)
    run.generate({row: len(prompt) for row, prompt in enumerate(prompts)})
    for _ in range(NEW_TOKENS - 1):
        run.generate(dict.fromkeys(range(len(prompts)), 1))
    decoder.close()
    return run.tokens
