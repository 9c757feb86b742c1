"""What the fused decoder takes, refuses, and leaves alone."""

from __future__ import annotations

import threading

import pytest
import torch
from fused_driver import PagedRun, make_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from worker_service.fused.decoder import FusedDecoder
from worker_service.fused.llama import unsupported_reason


def tiny_llama(**changes):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def test_the_model_is_empty_afterwards():
    model = make_model("llama")
    decoder = FusedDecoder(model, torch.float32, threads=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert decoder.shape.vocab == 200


def test_tied_embeddings_are_kept_once():
    tied, untied = tiny_llama(tie_word_embeddings=True), tiny_llama(tie_word_embeddings=False)
    embedding = 4 * 50 * 32
    sizes = [FusedDecoder(model, torch.float32, threads=1).weight_bytes for model in (tied, untied)]
    assert sizes[1] - sizes[0] == embedding


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"intermediate_size": 40}, "intermediate_size of 40"),
        ({"head_dim": 8}, "head_dim of 8"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding \\(dynamic\\)",
        ),
    ],
)
def test_llamas_that_it_cannot_compute_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        FusedDecoder(tiny_llama(**changes), torch.float32)


def test_other_architectures_are_refused_with_the_list_of_known_ones():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))
    assert "LlamaForCausalLM" in unsupported_reason(model)


def test_replaced_linear_layers_are_refused():
    class Adapted(nn.Linear):
        pass

    model = tiny_llama()
    model.model.layers[0].mlp.down_proj = Adapted(48, 32, bias=False)
    assert "mlp.down_proj is a Adapted" in unsupported_reason(model)
    assert unsupported_reason(tiny_llama()) is None


def test_kv_of_the_wrong_shape_is_refused():
    decoder = FusedDecoder(make_model("llama"), torch.float32, threads=1)
    run = PagedRun(decoder)
    run.add([1, 2, 3])
    run.kv[1] = tuple(tensor.transpose(1, 2) for tensor in run.kv[1])
    with pytest.raises(ValueError, match="contiguous"):
        run.step({0: 3})


def test_only_the_slots_of_the_step_are_written():
    decoder = FusedDecoder(make_model("llama"), torch.float32, threads=2)
    run = PagedRun(decoder)
    run.add(list(range(21)))
    run.step({0: 21})
    for keys, values in run.kv:
        for cache in (keys, values):
            written = ~cache.isnan().all(dim=(1, 3))  # [blocks, block_size]
            expected = torch.zeros_like(written)
            expected[int(run.tables[0, 0])] = True
            expected[int(run.tables[0, 1]), :5] = True
            assert torch.equal(written, expected)
    decoder.close()


def test_new_kv_memory_and_a_close_between_steps_change_nothing():
    model = make_model("llama")
    expected = model(torch.tensor([[5, 6, 7, 8]])).logits[0, -1:]
    decoder = FusedDecoder(model, torch.float32, threads=2)
    for _ in range(3):
        run = PagedRun(decoder)
        run.add([5, 6, 7, 8])
        torch.testing.assert_close(run.step({0: 4}), expected, atol=1e-4, rtol=1e-4)
        decoder.close()


def test_close_and_collection_end_the_threads():
    before = set(threading.enumerate())  # others may end meanwhile
    for closes in (True, False):
        decoder = FusedDecoder(make_model("llama"), torch.float32, threads=4)
        run = PagedRun(decoder)
        run.add([1])
        run.step({0: 1})
        helpers = set(threading.enumerate()) - before
        assert len(helpers) == 3
        if closes:
            decoder.close()
        del run, decoder
        assert not any(helper.is_alive() for helper in helpers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_profile_names_every_stage_and_adds_up(dtype):
    decoder = FusedDecoder(make_model("llama"), dtype, threads=2)
    run = PagedRun(decoder)
    run.add(list(range(40)))
    run.step({0: 40})
    shares = decoder.profile()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) > 0.0  # a stage that was not run would have no time, or another step's
    assert {"embedding", "qkv", "attention", "gate + up", "down", "logits"} <= shares.keys()
    assert ("convert" in shares) == (dtype == torch.int8)
    decoder.close()


def test_a_warm_up_writes_nothing_but_the_null_block():
    run = PagedRun(FusedDecoder(make_model("qwen3"), torch.float32, threads=2))
    run.decoder.warm_up(run.kv)
    for cache in (cache for pair in run.kv for cache in pair):
        written = ~cache.isnan().all(dim=(1, 3))  # [blocks, block_size]
        assert written[0, 0]
        assert written.sum() == 1
    run.decoder.close()
