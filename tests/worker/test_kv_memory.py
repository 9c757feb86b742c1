"""KV memory is as large as asked, refused with numbers where too small, and copies blocks as one."""

import numpy as np
import psutil
import pytest
import torch

from worker_service.config import WorkerConfig
from worker_service.errors import KvMemoryError
from worker_service.kv_memory import KvMemory, LayerShape, bytes_per_token, plan_capacity

LAYERS = (LayerShape(2, 8, None), LayerShape(1, 16, 64))
CPU = torch.device("cpu")
TOKEN_BYTES = 2 * (2 * 8 + 16) * 4


def capacity(model_len=100, **options):
    config = WorkerConfig(model="m", **options)
    return plan_capacity(config, TOKEN_BYTES, model_len, CPU, profiles=[lambda: pytest.fail("not on a CPU")])


def test_bytes_of_a_token():
    assert bytes_per_token(LAYERS, torch.float32) == TOKEN_BYTES
    assert bytes_per_token(LAYERS, torch.bfloat16) == TOKEN_BYTES // 2


def test_a_given_size_is_used_to_the_block():
    block = 16 * TOKEN_BYTES
    assert capacity(kv_memory=20 * block + block - 1).num_blocks == 20
    assert capacity(num_blocks=9, kv_memory="1GiB").num_blocks == 9


def test_by_default_no_more_than_is_of_use():
    made = capacity(max_num_seqs=3, block_size=16)
    assert (made.num_blocks, made.max_model_len) == (3 * 7 + 1, 100)


def test_by_default_a_share_of_free_memory(monkeypatch):
    class FakeMemory:
        available = 100 * 16 * TOKEN_BYTES

    monkeypatch.setattr(psutil, "virtual_memory", FakeMemory)
    assert capacity(max_num_seqs=50).num_blocks == 40


def test_the_models_own_length_is_lowered_to_what_fits():
    made = capacity(model_len=1000, num_blocks=5)
    assert (made.num_blocks, made.max_model_len) == (5, 64)


def test_a_length_that_was_asked_for_is_refused_with_numbers():
    with pytest.raises(KvMemoryError) as caught:
        capacity(max_model_len=100, num_blocks=5)
    need = 8 * 16 * TOKEN_BYTES
    for part in ("5 KV blocks", "hold 64 tokens", "have 100", f"{need:,} bytes", "--kv-memory"):
        assert part in str(caught.value)


@pytest.mark.parametrize("options", [{"kv_memory": "100TiB"}, {"num_blocks": 10**11}])
def test_more_than_the_machine_has_is_refused_with_numbers(options):
    with pytest.raises(
        KvMemoryError, match=r"would take [\d,]{19} bytes, and [\d,]+ are free .* --num-blocks"
    ):
        capacity(**options)


def test_memory_for_no_block_at_all_is_refused():
    with pytest.raises(KvMemoryError, match="0 KV blocks"):
        capacity(kv_memory=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_in_every_layer_and_read_first(dtype):
    kv = KvMemory(LAYERS, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    for cache in (*kv.keys, *kv.values):
        assert cache.dtype == dtype
        assert cache.count_nonzero() == 0
        cache[:] = torch.arange(5)[:, None, None, None]
    kv.copy_blocks(np.array([1, 2, 3], np.int32), np.array([2, 3, 4], np.int32))
    for layer, keys, values in zip(LAYERS, kv.keys, kv.values, strict=True):
        for cache in (keys, values):
            assert cache.shape == (5, layer.kv_heads, 4, layer.head_dim)
            assert cache[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 3]
    kv.copy_blocks(np.empty(0, np.int32), np.empty(0, np.int32))
