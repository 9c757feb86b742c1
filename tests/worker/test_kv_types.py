"""KV may be of another type than weights: what that is, what is refused, and that fp8 keeps its scales."""

import numpy as np
import pytest
import torch
from fake_scheduler import FakeScheduler
from torch import nn

from tidegate_kernels import cpu, reference
from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.attention import RecordingStep, Terms
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.executor import Executor
from worker_service.host_memory import HostMemory
from worker_service.kv_memory import KvMemory, LayerShape, bytes_per_token, choose_kv_dtype
from worker_service.model import load_model
from worker_service.plan import Limits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "weights", "device", "backend", "decoder", "kv"),
    [
        ("auto", FP32, CPU, "cpu", "fused", FP32),
        ("auto", BF16, CUDA, "triton", "generic", BF16),
        ("auto", FP16, CPU, "cpu", "generic", FP16),
        ("bfloat16", FP32, CPU, "cpu", "fused", BF16),
        ("float32", BF16, CPU, "cpu", "fused", FP32),
        ("bfloat16", FP32, CPU, "cpu", "generic", BF16),
        ("fp8_e4m3", BF16, CUDA, "triton", "generic", FP8),
        ("fp8_e4m3", FP32, CPU, "reference", "generic", FP8),
    ],
)
def test_the_type_by_its_name(name, weights, device, backend, decoder, kv, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = WorkerConfig(model="m", kv_dtype=name)
    assert choose_kv_dtype(config, weights, device, backend, decoder) == kv


@pytest.mark.parametrize(("name", "kv"), [("auto", BF16), ("float32", FP32)])
def test_beside_int8_weights_kv_is_bf16_unless_told_otherwise(name, kv):
    config = WorkerConfig(model="m", quantization="int8", kv_dtype=name)
    assert choose_kv_dtype(config, FP32, CPU, "cpu", "fused") == kv


@pytest.mark.parametrize(
    ("name", "weights", "device", "decoder", "told"),
    [
        ("fp8_e4m3", FP32, CPU, "fused", "on a CPU, KV is float32 or bfloat16"),
        ("float16", FP16, CPU, "fused", "on a CPU, KV is float32 or bfloat16"),
        ("float16", BF16, CPU, "generic", "on a CPU, KV is float32 or bfloat16"),
        ("float32", BF16, CUDA, "generic", "of the weights, which is bfloat16, or fp8_e4m3 beside bfloat16"),
        (
            "fp8_e4m3",
            FP32,
            CUDA,
            "generic",
            "which is float32, or fp8_e4m3 beside bfloat16; choose another --dtype",
        ),
        ("fp8_e4m3", FP16, CUDA, "generic", "which is float16, or fp8_e4m3 beside bfloat16"),
        ("fp8_e4m3", BF16, CUDA, "generic", "capability 8.9 or newer; this one has 8.0"),
    ],
)
def test_what_no_kernel_computes_is_refused(name, weights, device, decoder, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = WorkerConfig(model="m", kv_dtype=name)
    with pytest.raises(UnsupportedModelError, match=told) as caught:
        choose_kv_dtype(config, weights, device, "cpu" if device == CPU else "triton", decoder)
    assert f"--kv-dtype {name}" in str(caught.value)


def test_a_smaller_type_takes_less_memory():
    layers = [LayerShape(2, 8, None)] * 3
    assert bytes_per_token(layers, FP32) == 3 * 2 * 2 * 8 * 4
    assert bytes_per_token(layers, FP8) == 3 * 2 * 2 * 8


@pytest.mark.parametrize("decoder", ["fused", "generic"])
def test_bf16_kv_of_fp32_weights_gives_nearly_the_same_logits(decoder, tiny_model, generate):
    """The load compares them with the plain forward's, and refuses what is far off."""
    options = {"decoder": decoder, "kv_dtype": "bfloat16"}
    model = load_model(WorkerConfig(model=str(tiny_model("llama")), **options), lambda share, detail: None)
    assert (model.dtype, model.kv_dtype, model.decoder_name) == (FP32, BF16, decoder)
    executor = executor_on(model)
    scheduler = FakeScheduler(executor)
    prompt = tuple(range(5, 30))
    scheduler.add("a", list(prompt))
    scheduler.run(budget=9, max_new=3)
    assert executor._kv.keys[0].dtype == BF16
    assert scheduler.outputs()["a"] == generate("llama", prompt, 3)


def test_fp8_kv_is_served_by_the_reference_and_refused_by_cpu_kernels(tiny_model):
    options = {"model": str(tiny_model("llama")), "decoder": "generic", "kv_dtype": "fp8_e4m3"}
    model = load_model(WorkerConfig(**options, attention_backend="reference"), lambda share, detail: None)
    executor = executor_on(model)
    scheduler = FakeScheduler(executor)
    scheduler.add("a", list(range(5, 30)))
    scheduler.run(budget=9, max_new=3)
    assert executor._kv.keys[0].dtype == FP8
    assert executor._kv.keys[0].float().abs().max() > 0
    assert len(scheduler.outputs()["a"]) == 3
    with pytest.raises(UnsupportedModelError, match="--kv-dtype fp8_e4m3"):
        load_model(WorkerConfig(**options), lambda share, detail: None)


def executor_on(model) -> Executor:
    limits = Limits(
        num_slots=2,
        num_blocks=20,
        block_size=8,
        max_batched_tokens=64,
        max_model_len=80,
        vocab_size=model.vocab_size,
    )
    return Executor(model, KvMemory(model.layers, 20, 8, model.kv_dtype, model.device), limits)


@pytest.mark.parametrize("backend", [reference, cpu])
def test_scales_bring_numbers_into_the_range_of_fp8_and_back(backend):
    """Values far beyond 448, and far below what fp8 tells from 0, come out within its 3 bits of mantissa."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(20, 1, 16, generator=generator) * 1e-4
    value = torch.randn(20, 1, 16, generator=generator) * 1e4
    query = torch.randn(1, 2, 16, generator=generator) * 1e4
    kv = KvMemory([LayerShape(1, 16, None, key_scale=1e-6, value_scale=100.0)], 4, 8, FP8, CPU)
    key_scale, value_scale = kv.scales[0]
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    backend.write_kv(key, value, kv.keys[0], kv.values[0], torch.arange(8, 28), **scales)
    batch = AttentionBatch.from_host(
        np.array([0, 1], np.int32),
        np.array([20], np.int32),
        np.array([[1, 2, 3]], np.int32),
        np.array([27]),
    )
    terms = {"scale": 0.25, "window": None, "softcap": None}
    found = backend.paged_attention(query, kv.keys[0], kv.values[0], batch, **terms, **scales)
    weights = (query[0] @ key[:, 0].T * 0.25).softmax(-1)  # [2, 20]
    expected = weights @ value[:, 0]
    assert (found[0] - expected).norm() < 0.06 * expected.norm()
    saturated = torch.full((1, 1, 16), 1e9)
    backend.write_kv(saturated, -saturated, kv.keys[0], kv.values[0], torch.tensor([8]), **scales)
    assert kv.keys[0][1, 0, 0].float().tolist() == [448.0] * 16
    assert kv.values[0][1, 0, 0].float().tolist() == [-448.0] * 16


def test_scales_are_for_fp8_alone():
    layers = [LayerShape(1, 16, None, key_scale=0.5, value_scale=2.0)]
    assert KvMemory(layers, 2, 8, FP8, CPU).scales == [(0.5, 2.0)]
    assert KvMemory(layers, 2, 8, BF16, CPU).scales == [(1.0, 1.0)]


def test_blocks_of_fp8_are_copied_and_swapped_bit_for_bit():
    kv = KvMemory([LayerShape(1, 16, None)], num_blocks=5, block_size=4, dtype=FP8, device=CPU)
    bits = torch.randint(0, 256, (5, 1, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for cache in kv.plain:
        cache.copy_(bits)
    host = HostMemory(kv, 2)
    host.swap_out(np.array([3], np.int32), np.array([1], np.int32))
    kv.copy_blocks(np.array([1], np.int32), np.array([3], np.int32))
    host.swap_in(np.array([1], np.int32), np.array([4], np.int32))
    for cache in (kv.keys[0].view(torch.uint8), kv.values[0].view(torch.uint8)):
        assert torch.equal(cache, bits[[0, 1, 2, 1, 3]])


class FakeLayer(nn.Module):
    """An attention layer as a calibrated checkpoint leaves it."""

    def __init__(self, **scales: torch.Tensor) -> None:
        super().__init__()
        self.layer_idx = 0
        for name, scale in scales.items():
            self.register_buffer(name, scale)


def record(layer: nn.Module) -> LayerShape:
    step, tokens = RecordingStep(), torch.zeros(1, 2, 16)
    step.layer(layer, tokens, tokens, tokens, Terms(1.0, None, None, {}))
    return step.shapes[0]


def test_scales_come_from_the_checkpoint():
    assert record(FakeLayer()) == LayerShape(2, 16, None, 1.0, 1.0)
    calibrated = FakeLayer(k_scale=torch.tensor([0.5], dtype=BF16), v_scale=torch.tensor(0.25))
    assert record(calibrated) == LayerShape(2, 16, None, 0.5, 0.25)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.zeros(1), torch.tensor(float("inf"))])
def test_scales_that_are_not_one_number_are_refused(scale):
    with pytest.raises(UnsupportedModelError, match="its v_scale is not one positive number"):
        record(FakeLayer(v_scale=scale))
