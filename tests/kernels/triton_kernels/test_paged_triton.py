"""Paged attention in Triton gives the reference's results."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from paged_cases import SHAPES, Case, Shape, make_case

from tidegate_kernels import reference, triton_backend
from tidegate_kernels.attention_batch import AttentionBatch
from tidegate_kernels.paged_decode import paged_decode, split_count
from tidegate_kernels.paged_prefill import paged_prefill


def on_device(case: Case, device: torch.device) -> Case:
    batch = AttentionBatch.from_host(
        case.batch.query_starts_host,
        case.batch.seq_lens_host,
        case.batch.block_tables.numpy(),
        case.batch.slot_mapping.numpy(),
        device,
    )
    moved = {name: getattr(case, name).to(device) for name in ("query", "key_cache", "value_cache")}
    return dataclasses.replace(case, batch=batch, **moved)


def expected_of(case: Case) -> torch.Tensor:
    return reference.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, **case.options)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}


def test_attention_equals_reference(shape: Shape, device: torch.device) -> None:
    case = on_device(make_case(shape), device)
    result = triton_backend.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, **case.options
    )
    torch.testing.assert_close(result, expected_of(case), **tolerance(torch.float32))


@pytest.mark.parametrize("name", ["gqa-decode", "mqa-chunks-40", "gqa-mixed-128-window"])
def test_fp16_equals_reference_to_a_rounding(name: str, device: torch.device) -> None:
    case = on_device(make_case(SHAPES[name], torch.float16), device)
    result = triton_backend.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, **case.options
    )
    torch.testing.assert_close(result, expected_of(case), **tolerance(torch.float16))


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 70])
def test_splits_merge_to_the_same_result(splits: int, window: int | None, device: torch.device) -> None:
    shape = Shape(((200, 1), (0, 1), (63, 1)), heads=6, kv_heads=2, head_dim=80, block_size=16, window=window)
    case = on_device(make_case(shape), device)
    output = torch.empty_like(case.query)
    paged_decode(
        case.query, case.key_cache, case.value_cache, case.batch, output, splits=splits, **case.options
    )
    torch.testing.assert_close(output, expected_of(case), **tolerance(torch.float32))


def test_each_kernel_leaves_the_other_rows_alone(device: torch.device) -> None:
    case = on_device(make_case(SHAPES["gqa-mixed"]), device)
    starts = case.batch.query_starts_host
    expected = expected_of(case)
    decoded = torch.full_like(case.query, 7.0)
    paged_decode(case.query, case.key_cache, case.value_cache, case.batch, decoded, splits=2, **case.options)
    prefilled = torch.full_like(case.query, 7.0)
    operands = (case.query, case.key_cache, case.value_cache, case.batch, prefilled)
    paged_prefill(*operands, skip_decodes=True, **case.options)
    for begin, end in itertools.pairwise(starts):
        written, untouched = (decoded, prefilled) if end - begin == 1 else (prefilled, decoded)
        torch.testing.assert_close(written[begin:end], expected[begin:end], **tolerance(torch.float32))
        assert (untouched[begin:end] == 7.0).all()


@pytest.mark.parametrize("name", ["gqa-decode", "gqa-chunks"])
def test_scales_stand_for_a_cache_of_smaller_numbers(name: str, device: torch.device) -> None:
    case = on_device(make_case(SHAPES[name]), device)
    output = torch.empty_like(case.query)
    kernel = paged_decode if case.batch.max_query_len == 1 else paged_prefill
    scales = {"key_scale": 4.0, "value_scale": 0.5}
    kernel(
        case.query, case.key_cache / 4.0, case.value_cache / 0.5, case.batch, output, **scales, **case.options
    )
    torch.testing.assert_close(output, expected_of(case), **tolerance(torch.float32))


def test_strided_queries(device: torch.device) -> None:
    case = on_device(make_case(SHAPES["gqa-mixed"]), device)
    by_head = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    result = triton_backend.paged_attention(
        by_head, case.key_cache, case.value_cache, case.batch, **case.options
    )
    torch.testing.assert_close(result, expected_of(case), **tolerance(torch.float32))


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = on_device(make_case(SHAPES["gqa-decode"]), device)
    with pytest.raises(ValueError, match="5 heads of 64 do not fit caches of 3 heads of 64"):
        paged_decode(case.query[:, :5], case.key_cache, case.value_cache, case.batch, case.query, scale=1.0)
    with pytest.raises(ValueError, match="must be contiguous within a block"):
        strided = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
        paged_prefill(case.query, strided, case.value_cache, case.batch, case.query, scale=1.0)


@pytest.mark.parametrize("name", ["gqa-decode", "gqa-decode-window", "mha-decode-40-softcap"])
def test_what_a_decode_launches_follows_from_rows_and_longest_length_alone(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a captured graph needs it: lengths are read on the device, and short rows leave splits empty."""
    monkeypatch.setattr("tidegate_kernels.paged_decode.processor_count", lambda device: 132)
    case = on_device(make_case(SHAPES[name]), device)
    rows = len(case.batch.seq_lens_host)
    nothing = np.zeros(rows, np.int32)
    captured = dataclasses.replace(
        case.batch, max_seq_len=5000, seq_lens_host=nothing, query_starts_host=nothing
    )
    result = triton_backend.paged_attention(
        case.query, case.key_cache, case.value_cache, captured, **case.options
    )
    torch.testing.assert_close(result, expected_of(case), **tolerance(torch.float32))


def test_split_count_fills_the_processors_but_not_more() -> None:
    assert split_count(rows=1, kv_heads=8, most_seen=100_000, processors=132) == 32
    assert split_count(rows=256, kv_heads=8, most_seen=100_000, processors=132) == 1
    assert split_count(rows=1, kv_heads=8, most_seen=200, processors=132) == 1
