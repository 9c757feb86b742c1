"""The compiled pieces against numpy and torch: matrix kernels that this processor has, rounding, the crew."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numba import njit

from worker_service.fused import crew, isa, tile, tile_steps
from worker_service.fused.llama import Outline, Shape
from worker_service.fused.memory import from_cache_order, to_cache_order, write_row
from worker_service.fused.packing import kind_of, pack
from worker_service.fused.rotary import RotaryTable
from worker_service.fused.rows import convert_row
from worker_service.fused.scores import read_square, score_tokens
from worker_service.fused.tile import Kernel, add_cache_rows
from worker_service.fused.vectors import exponentiate, max_visible, silu_multiply

INPUTS = 80
VARIANTS = {
    "fp32": (torch.float32, tile.FP32),
    "bf16 widened": (torch.bfloat16, Kernel("bf16", tile_steps.step_bf16, 2, 64, 8, tile.VECTOR_F32)),
    "int8 anywhere": (torch.int8, Kernel("int8_plain", tile_steps.step_int8, 2, 32, 4, tile.VECTOR_I32)),
}
if isa.HAS_AVX2:
    VARIANTS["int8 AVX2"] = (
        torch.int8,
        Kernel("int8_pairs", tile_steps.step_int8_pairs, 2, 32, 4, tile.VECTOR_I32),
    )
if isa.HAS_BF16_DOT:
    VARIANTS["bf16 dot"] = (torch.bfloat16, tile.BF16)
if isa.HAS_INT8_DOT:
    VARIANTS["int8 VNNI"] = (torch.int8, tile.INT8)


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_panel_times_any_number_of_rows_is_the_matrix_product(variant, monkeypatch):
    dtype, kernel = VARIANTS[variant]
    kind = kind_of(dtype)
    monkeypatch.setitem(tile.KERNELS, str(kind.dtype), kernel)
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.int8:
        weight = torch.randint(-127, 128, (16, INPUTS), generator=generator).float()
        weight[:, 0] = 127.0  # so that the scale is 1 and the weights are the panel's
        rows = torch.randint(-3000, 3000, (isa.MAX_TILE_ROWS, INPUTS), generator=generator, dtype=torch.int16)
    else:
        weight = torch.randn(16, INPUTS, generator=generator).to(dtype)
        rows = torch.randn(isa.MAX_TILE_ROWS, INPUTS, generator=generator)
        rows = rows.bfloat16() if kernel.name == "bf16_dot" else rows
    packed = pack([weight], None, dtype)

    @njit
    def multiply(kind, count, x, stride, panel, steps, out):
        tile.multiply_panel(kind, count, x, stride, panel, steps, out, panel, 0)

    stride = INPUTS * rows.element_size()
    steps = INPUTS // kernel.group
    for count in range(1, isa.MAX_TILE_ROWS + 1):
        out = torch.full(
            (isa.MAX_TILE_ROWS, 16), -1, dtype=torch.int32 if dtype == torch.int8 else torch.float32
        )
        multiply(kind, count, address(rows), stride, address(packed.panels), steps, address(out))
        expected = rows[:count].double() @ weight.double().T
        torch.testing.assert_close(out[:count].double(), expected, atol=1e-4, rtol=1e-4)
        assert (out[count:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_mixed_values_equal_plain_products(dtype):
    kind = kind_of(dtype)
    cache = torch.randn(13, 48).to(dtype)  # tokens, head_dim
    queries = torch.randn(6, 48)

    @njit
    def score(kind, queries, ordered, cache, tokens, vectors, out):
        for index in range(0, vectors * 48, 16):
            to_cache_order(kind, queries + 4 * index, np.float32(0.5), ordered + 4 * index)
        score_tokens(kind, vectors, ordered, cache, tokens, 48, out, 4 * 20, cache)

    @njit
    def mix(kind, weights, cache, tokens, vectors, sums, out):
        for index in range(0, 48, 16):
            columns = cache + index * kind.itemsize
            add_cache_rows(
                kind, vectors, weights, 4 * 20, columns, 48 * kind.itemsize, tokens, sums + 4 * index, 4 * 48
            )
        for index in range(0, vectors * 48, 16):
            from_cache_order(kind, sums + 4 * index, np.float32(2.0), out + 4 * index)

    ordered, out, sums = torch.empty(6, 48), torch.zeros(6, 20), torch.zeros(6, 48)
    for vectors in range(1, 7):
        for tokens in (1, 2, 3, 4, 5, 13):
            score(kind, address(queries), address(ordered), address(cache), tokens, vectors, address(out))
            expected = 0.5 * queries[:vectors] @ cache[:tokens].float().T
            torch.testing.assert_close(out[:vectors, :tokens], expected, atol=1e-5, rtol=1e-5)
            mixed = torch.empty(6, 48)
            sums.zero_()
            mix(kind, address(out), address(cache), tokens, vectors, address(sums), address(mixed))
            expected = 2.0 * out[:vectors, :tokens] @ cache[:tokens].float()
            torch.testing.assert_close(mixed[:vectors], expected, atol=1e-4, rtol=1e-4)


def test_bf16_is_rounded_as_torch_does_and_read_back_in_cache_order():
    kind = kind_of(torch.bfloat16)
    values = torch.randn(64) * torch.logspace(-30, 30, 64)
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.00390625])  # the last is a tie
    written, back = torch.empty(64, dtype=torch.bfloat16), torch.empty(4, 16, 16)
    rows = np.zeros(16, np.int64)

    @njit
    def copy(kind, source, written, rows, rows_at, back):
        for index in range(0, 64, 16):
            write_row(kind, source + 4 * index, written + 2 * index)
            rows[:] = written + 2 * index
            read_square(kind, rows_at, back + 4 * 16 * index)

    copy(kind, address(values), address(written), rows, address(rows), address(back))
    assert torch.equal(written.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))
    ordered = written.float().view(4, 8, 2).transpose(1, 2).reshape(64)
    for lane in range(16):
        assert torch.equal(back[:, :, lane].flatten().nan_to_num(7.0), ordered.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_rows_from_anywhere_become_columns(dtype):
    cache, out = torch.randn(40, 16).to(dtype), torch.empty(16, 16)
    chosen = torch.randperm(40)[:16]
    rows = cache.data_ptr() + chosen.numpy() * 16 * cache.element_size()

    @njit
    def read(kind, rows, out):
        read_square(kind, rows, out)

    read(kind_of(dtype), address(rows), address(out))
    expected = cache[chosen].float()
    if dtype == torch.bfloat16:  # its cache order: even columns, then odd ones
        expected = expected.view(16, 8, 2).transpose(1, 2).reshape(16, 16)
    assert torch.equal(out, expected.T)


def test_exponentials_are_within_a_few_ulp_over_their_whole_range():
    scores = torch.linspace(-100.0, 0.0, 16 * 500)
    gates = torch.linspace(-120.0, 120.0, 16 * 500)
    weights, joined = scores.clone(), torch.empty_like(gates)
    ups = torch.full_like(gates, 3.0)

    @njit
    def run(weights, gates, ups, joined, count):
        total = exponentiate(weights, count // 16, np.float32(0.0), 0, count)
        for index in range(0, count, 16):
            silu_multiply(gates + 4 * index, ups + 4 * index, joined + 4 * index)
        return total

    total = run(address(weights), address(gates), address(ups), address(joined), len(scores))
    expected = scores.double().exp()
    torch.testing.assert_close(weights.double(), expected, atol=1e-37, rtol=3e-7)
    assert total == pytest.approx(float(expected.sum()), rel=1e-5)
    expected = torch.nn.functional.silu(gates.double()) * 3.0
    torch.testing.assert_close(joined.double(), expected, atol=1e-30, rtol=5e-7)


def test_hidden_lanes_take_no_part():
    scores = torch.arange(48, dtype=torch.float32)
    scores[40:] = torch.nan  # what was never written may be anything

    @njit
    def run(scores, first, last):
        largest = max_visible(scores, 3, first, last)
        return largest, exponentiate(scores, 3, largest, first, last)

    elsewhere = scores.clone()
    assert run(address(elsewhere), 60, 70)[0] == -np.inf
    largest, total = run(address(scores), 19, 38)
    expected = torch.arange(19, 38, dtype=torch.float32).sub(37).exp()
    assert largest == 37.0
    assert total == pytest.approx(float(expected.sum()))
    assert torch.equal(scores.nonzero().flatten(), torch.arange(19, 38))


def test_a_score_that_is_nan_shows_in_the_sum():
    scores = torch.zeros(32)
    scores[20] = torch.nan

    @njit
    def run(scores):
        return exponentiate(scores, 2, max_visible(scores, 2, 0, 32), 0, 32)

    assert np.isnan(run(address(scores)))


@pytest.mark.parametrize("inputs", [64, 1536, 16384])
def test_int8_activations_use_as_many_levels_as_cannot_overflow(inputs):
    row, out = torch.randn(inputs), torch.empty(inputs, dtype=torch.int16)

    @njit
    def run(kind, row, count, out):
        return convert_row(kind, row, count, out)

    scale = run(kind_of(torch.int8), address(row), inputs, address(out))
    levels = int(out.abs().max())
    assert levels == min(32767, (2**31 - 1) // 127 // inputs)
    assert levels * 127 * inputs < 2**31
    torch.testing.assert_close(out * scale, row, atol=0.51 * scale, rtol=1e-6)


def test_a_stage_ends_when_its_items_are_done_though_a_helper_never_comes():
    words = crew.words_for(3)

    @njit(nogil=True)
    def work(words, items, number):
        crew.open_step(words, 3, number)
        taken = 0
        for stage in range(3):
            while crew.take(words, stage) < items:
                taken += 1
                crew.finish(words, stage, items)
            crew.wait(words, stage, items)
        crew.close_step(words)
        return taken

    for number in range(1, 50):
        assert work(address(words), 5, number) == 15
    assert (crew.stage_cycles(words, 3) > 0).all()


def test_helpers_share_every_item_once_and_go_home():
    words, done = crew.words_for(40), np.zeros((40, 64), np.int64)

    @njit(nogil=True)
    def stages(words, done):
        for stage in range(40):
            while True:
                item = crew.take(words, stage)
                if item >= 64:
                    break
                done[stage, item] += 1
                crew.finish(words, stage, 64)
            crew.wait(words, stage, 64)
            for item in range(64):  # every thread sees the whole of the stage before
                if done[stage, item] != done[0, 0]:
                    done[0, 0] = -1_000_000

    @njit(nogil=True)
    def lead(words, done, number):
        crew.open_step(words, 40, number)
        stages(words, done)
        crew.close_step(words)

    @njit(nogil=True)
    def follow(words, done):
        seen = 0
        while True:
            seen = crew.next_step(words, seen)
            if seen == crew.STOP:
                return
            if crew.enter(words, seen):
                stages(words, done)
            crew.leave(words)

    @njit(nogil=True)
    def dismiss(words):
        crew.stop(words)

    helpers = [threading.Thread(target=follow, args=(address(words), done)) for _ in range(3)]
    for helper in helpers:
        helper.start()
    for number in range(1, 301):
        lead(address(words), done, number)
    dismiss(address(words))
    for helper in helpers:
        helper.join(timeout=30)
    assert not any(helper.is_alive() for helper in helpers)
    assert (done == 300).all()


def test_the_rotary_table_grows_to_the_positions_that_are_asked_for():
    shape = Shape(1, 32, 2, 1, 4, 48, 50, 1e-5, 0.5)
    table = RotaryTable(Outline(shape, windows=(0,), tied=True, frequencies=(1.0, 0.5), rotary_scale=2.0))
    first = table.addresses(10)
    assert table.addresses(2048) == first
    table.addresses(2049)
    assert table._cosines.shape == (4096, 2)
    torch.testing.assert_close(table._sines[3000], 2.0 * torch.tensor([3000.0, 1500.0]).sin())
