"""The plain torch operations do what their definition says."""

import numpy as np
import pytest
import torch
from paged_cases import Shape, dense_attention, make_case

from tidegate_kernels import reference
from tidegate_kernels.attention_batch import AttentionBatch


def test_attention_equals_dense_attention(shape: Shape) -> None:
    case = make_case(shape)
    result = reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, **case.options
    )
    torch.testing.assert_close(result.double(), dense_attention(case), atol=2e-5, rtol=2e-5)


def test_bf16_attention_is_computed_in_fp32_and_rounded_once() -> None:
    case = make_case(
        Shape(((200, 3), (50, 1)), heads=4, kv_heads=2, head_dim=64, block_size=16), torch.bfloat16
    )
    result = reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, **case.options
    )
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), dense_attention(case), atol=1e-6, rtol=2**-8)


def test_write_puts_tokens_into_their_slots_and_nowhere_else() -> None:
    key = torch.randn(5, 2, 8)
    value = torch.randn(5, 2, 8)
    slots = torch.tensor([17, 4, 5, 31, 8])
    key_cache = torch.zeros(8, 2, 4, 8, dtype=torch.bfloat16)
    value_cache = torch.zeros_like(key_cache)
    reference.write_kv(key, value, key_cache, value_cache, slots)
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        for token, slot in zip(tokens, slots.tolist(), strict=True):
            assert torch.equal(cache[slot // 4, :, slot % 4], token.bfloat16())
        assert int(cache.abs().sum(-1).ne(0).sum()) == 5 * 2


@pytest.mark.parametrize(
    ("starts", "seq_lens", "message"),
    [
        ([0, 2], [1], "no more than its seq_len"),
        ([0, 1, 2], [5], "need 2 query_starts"),
        ([0, 1], [5], "must run from 0 to the 2 tokens"),
        ([0, 0, 2], [5, 5], "at least one new token"),
    ],
)
def test_columns_that_do_not_fit_are_refused(starts: list[int], seq_lens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch.from_host(
            np.array(starts, dtype=np.int32),
            np.array(seq_lens, dtype=np.int32),
            np.zeros((len(seq_lens), 1), dtype=np.int32),
            np.array([4, 5]),
        )
