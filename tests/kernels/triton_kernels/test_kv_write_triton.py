"""The KV write puts what it should where it should."""

import pytest
import torch

from tidegate_kernels import reference
from tidegate_kernels.kv_write import write_kv

SLOTS = [17, 4, 5, 63, 8]


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_write_equals_reference(cache_dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    slots = torch.tensor(SLOTS, device=device)
    fused = torch.randn(5, 2, 3, head_dim, device=device)
    if cache_dtype == torch.bfloat16:  # which the interpreter truncates to, where a GPU rounds
        fused = fused.bfloat16()
    caches = torch.zeros(2, 2, 8, 3, 8, head_dim, dtype=cache_dtype, device=device)
    for write, pair in ((write_kv, caches[0]), (reference.write_kv, caches[1])):
        write(fused[:, 0], fused[:, 1], pair[0], pair[1], slots)
    assert torch.equal(caches[0], caches[1])


def test_fp8_holds_scaled_numbers_and_saturates(device: torch.device) -> None:
    slots = torch.tensor(SLOTS, device=device)
    # Numbers that fp8 has: the interpreter rounds others wrongly.
    exact = (torch.randn(2, 5, 3, 64, device=device) * 30).to(torch.float8_e4m3fn)
    exact = torch.where(exact.float().abs() < 2**-6, 1.0, exact.float()).to(torch.float8_e4m3fn)
    key, value = exact[0].float() * 0.25, exact[1].float() * 0.5
    key[0, 0, :2] = torch.tensor([1e6, -1e6], device=device)
    exact[0, 0, 0, :2] = torch.tensor([448.0, -448.0], device=device).to(torch.float8_e4m3fn)
    caches = torch.zeros(2, 8, 3, 8, 64, dtype=torch.float8_e4m3fn, device=device)
    write_kv(key, value, caches[0], caches[1], slots, key_scale=0.25, value_scale=0.5)
    for cache, tokens in zip(caches, exact, strict=True):
        stored = torch.stack([cache[slot // 8, :, slot % 8] for slot in SLOTS])
        assert torch.equal(stored.float(), tokens.float())


def test_a_negative_slot_writes_nothing(device: torch.device) -> None:
    key = torch.randn(2, 1, 64, device=device)
    caches = torch.zeros(2, 2, 1, 8, 64, device=device)
    write_kv(key, key, caches[0], caches[1], torch.tensor([-1, 9], device=device))
    assert torch.equal(caches[0, 1, 0, 1], key[1, 0])
    assert int(caches.ne(0).any(-1).sum()) == 2


def test_caches_that_do_not_fit_are_refused(device: torch.device) -> None:
    key = torch.zeros(2, 1, 64, device=device)
    cache = torch.zeros(2, 2, 8, 64, device=device)
    with pytest.raises(ValueError, match="do not fit caches"):
        write_kv(key, key, cache, cache, torch.tensor([1, 2], device=device))
    with pytest.raises(ValueError, match="2 tokens need as many slots"):
        write_kv(key, key, cache[:, :1], cache[:, :1], torch.tensor([1], device=device))
