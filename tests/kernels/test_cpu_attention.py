"""The CPU backend gives the reference's results."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_cases import SHAPES, Case, Shape, make_case

from tidegate_kernels import cpu, cpu_layout, cpu_threads, reference


def compare(case: Case, atol: float, rtol: float) -> torch.Tensor:
    result = cpu.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, **case.options)
    expected = reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, **case.options
    )
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)
    return result


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu, "BYTES_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


def test_fp32_equals_reference(shape: Shape) -> None:
    compare(make_case(shape), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", ["gqa-decode", "mqa-chunks-40", "gqa-mixed-128-window", "mha-mixed-256"])
def test_bf16_equals_reference_to_a_rounding(name: str) -> None:
    compare(make_case(SHAPES[name], torch.bfloat16), atol=2e-6, rtol=2**-7)


def test_fp32_queries_over_a_bf16_cache() -> None:
    case = make_case(SHAPES["gqa-mixed"], torch.bfloat16)
    compare(dataclasses.replace(case, query=case.query.float()), atol=2e-6, rtol=2e-5)


def test_long_contexts_are_cut_into_stretches_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layout, "SHORTEST_STRETCH", 32)
    monkeypatch.setattr(cpu_layout, "TASKS_PER_THREAD", 100)
    shape = Shape(((300, 1), (0, 1), (31, 2), (100, 37)), heads=6, kv_heads=2, head_dim=64, block_size=16)
    case = make_case(shape)
    assert cpu_layout.layout_of(case.batch, None, 2, 16, 16, 1).first_state[-1] > 0
    first = compare(case, atol=2e-6, rtol=2e-5)
    again = compare(case, atol=2e-6, rtol=2e-5)  # the next layer finds the shared counters as the first did
    assert torch.equal(first, again)


def test_window_that_ends_inside_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layout, "SHORTEST_STRETCH", 16)
    monkeypatch.setattr(cpu_layout, "TASKS_PER_THREAD", 100)
    shape = Shape(((300, 1), (170, 40)), heads=2, kv_heads=1, head_dim=64, block_size=8, window=50)
    compare(make_case(shape), atol=2e-6, rtol=2e-5)


def test_queries_may_be_strided() -> None:
    case = make_case(Shape(((20, 1), (3, 5)), heads=4, kv_heads=2, head_dim=64, block_size=16))
    expected = cpu.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, **case.options)
    fused = torch.zeros(6, 9, 64)
    fused[:, 2:6] = case.query
    by_head = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    for query in (fused[:, 2:6], by_head):
        assert not query.is_contiguous()
        result = cpu.paged_attention(query, case.key_cache, case.value_cache, case.batch, **case.options)
        assert torch.equal(result, expected)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(Shape(((500, 1), (40, 20)), heads=3, kv_heads=1, head_dim=64, block_size=16))
    case.query.mul_(300)
    compare(case, atol=1e-3, rtol=1e-3)  # scores around 1,000: their last bit is 1e-4 of a weight


def test_a_nan_in_a_visible_key_shows() -> None:
    case = make_case(Shape(((20, 1), (20, 1)), heads=2, kv_heads=1, head_dim=64, block_size=16))
    slot = int(case.batch.block_tables[1, 0])
    case.key_cache[slot, 0, 3, 5] = float("nan")
    result = cpu.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, **case.options)
    assert result[0].isfinite().all()
    assert result[1].isnan().all()


def test_shapes_without_a_kernel_go_to_the_reference() -> None:
    for dtype, head_dim in ((torch.float16, 64), (torch.float32, 12)):
        shape = Shape(((20, 1), (3, 5)), heads=2, kv_heads=1, head_dim=head_dim, block_size=16)
        case = make_case(shape, dtype)
        compare(case, atol=0, rtol=0)


def test_heads_that_do_not_divide_are_refused() -> None:
    case = make_case(Shape(((20, 1),), heads=2, kv_heads=2, head_dim=64, block_size=16))
    with pytest.raises(ValueError, match="3 query heads can't share 2 KV heads"):
        cpu.paged_attention(
            torch.zeros(1, 3, 64),
            case.key_cache,
            case.value_cache,
            case.batch,
            scale=1.0,
            window=None,
            softcap=None,
        )


@pytest.mark.parametrize(
    ("group", "together"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (7, 4), (8, 4), (32, 4)]
)
def test_heads_computed_together(group: int, together: int) -> None:
    assert cpu.heads_together(group) == together


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_write_equals_reference(source: torch.dtype, target: torch.dtype) -> None:
    slots = torch.from_numpy(np.random.default_rng(0).permutation(9 * 8)[:20])
    fused = torch.randn(20, 3, 4, 40).to(source)
    results = []
    for backend in (cpu, reference):
        caches = torch.zeros(2, 9, 4, 8, 40, dtype=target)
        backend.write_kv(fused[:, 1], fused[:, 2], caches[0], caches[1], slots)
        results.append(caches)
    assert torch.equal(results[0], results[1])


def test_warm_up_leaves_the_kernel_compiled() -> None:
    cpu.warm_up(64, 16, torch.float32, group=3)
    before = cpu.cpu_kernel.compiled.cache_info().misses
    compare(
        make_case(Shape(((5, 1),), heads=3, kv_heads=1, head_dim=64, block_size=16)), atol=2e-6, rtol=2e-5
    )
    assert cpu.cpu_kernel.compiled.cache_info().misses == before


def test_without_openmp_threads_come_from_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SHAPES["gqa-mixed"])
    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(cpu_threads, "_PARALLEL", None)
        monkeypatch.setattr(cpu_threads, "_POOL", pool)
        compare(case, atol=2e-6, rtol=2e-5)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, tidegate_kernels; print(sorted({'torch', 'triton', 'numba'} & set(sys.modules)))"
    kernels = Path(__file__).parents[2] / "kernels"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=kernels, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
