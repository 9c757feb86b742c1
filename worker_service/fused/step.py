"""One step of the decoder, compiled: embedding, layers, logits, and the loops of the threads that share it.

Owns the order of the stages. Everything is found through the records of `records.py`; the three `kind` arrays
are empty and only carry a type: of the packed weights, of the embedding, of the KV cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from worker_service.fused import crew
from worker_service.fused.attention import live_window
from worker_service.fused.lanes import LANES
from worker_service.fused.matmul import multiply
from worker_service.fused.records import (
    ATTENTION_OUT,
    DOWN,
    GATE_UP,
    MATRICES_PER_LAYER,
    QUERY_KEY_VALUE,
)
from worker_service.fused.stages import (
    attend,
    attend_prefixes,
    convert_rows,
    embed,
    norm_rows,
    pick_rows,
    rotate_and_write,
)
from worker_service.fused.vectors import converts

STAGES_PER_LAYER = 11
OTHER_STAGES = 4


def stage_names(windows: list[bool], converted: bool, sampled: bool, shared: bool) -> list[str]:
    """What the stages of a step are, in order: as `_run_stages` has them.

    `windows`: of each layer, whether its window hides keys in this step. `shared`: whether there are
    prefix units.
    """
    conversion = ["convert"] if converted else []
    first = ["norm", "qkv", "rotary + KV write"]
    rest = [*conversion, "attention out", "norm", "gate + up", *conversion, "down"]
    names = ["embedding"]
    for layer, window in enumerate(windows):
        names += first
        last = layer == len(windows) - 1
        if last and not sampled:
            return names
        names += ["attention over ranges"] if shared and not window else []
        names += ["attention", *(["pick rows"] if last else []), *rest]
    return [*names, "norm", "logits"]


@njit(nogil=True, inline="always")
def _run_stages(
    kinds: Any, words: int, models: Any, layers: Any, matrices: Any, steps: Any, thread: int
) -> None:
    """What every thread of the crew does in a step."""
    kind, embedding_kind, cache_kind = kinds
    model, step = models[0], steps[0]
    scratch = step.scratch + thread * step.scratch_bytes
    logits = matrices[model.layers * MATRICES_PER_LAYER]
    stage = embed(kind, embedding_kind, words, np.int64(0), model, step, logits)
    for index in range(model.layers):
        layer = layers[index]
        first = index * MATRICES_PER_LAYER
        stage = norm_rows(
            kind, words, stage, model, step, layer.input_norm, step.hidden, step.tokens, scratch
        )
        stage = multiply(
            kind,
            words,
            stage,
            step,
            matrices[first + QUERY_KEY_VALUE],
            step.input,
            step.input_stride,
            step.tokens,
            step.projected,
            4 * (model.heads + 2 * model.kv_heads) * model.head_dim,
            scratch,
        )
        stage = rotate_and_write(cache_kind, words, stage, model, layer, step)
        hidden, mixed, rows = step.hidden, step.mixed, step.tokens
        if index == model.layers - 1:
            if step.sampled == 0:
                return
            hidden, mixed, rows = step.picked_hidden, step.picked_mixed, step.sampled
        if step.prefix_units > 0 and live_window(layer, step) == 0:
            stage = attend_prefixes(cache_kind, words, stage, model, layer, step, scratch)
        stage = attend(cache_kind, words, stage, model, layer, step, scratch)
        if index == model.layers - 1:
            stage = pick_rows(words, stage, model, step)
        stage = _finish_layer(
            kind, words, stage, model, layer, matrices, first, step, hidden, mixed, rows, scratch
        )
    stage = norm_rows(
        kind, words, stage, model, step, model.final_norm, step.picked_hidden, step.sampled, scratch
    )
    multiply(
        kind,
        words,
        stage,
        step,
        logits,
        step.input,
        step.input_stride,
        step.sampled,
        step.logits,
        4 * LANES * logits.panels,
        scratch,
    )


@njit(nogil=True, inline="always")
def _finish_layer(
    kind: Any,
    words: int,
    stage: int,
    model: Any,
    layer: Any,
    matrices: Any,
    first: int,
    step: Any,
    hidden: int,
    mixed: int,
    rows: int,
    scratch: int,
) -> int:
    """From attention's result to the residual after the MLP."""
    width = model.heads * model.head_dim
    source, stride = mixed, 4 * width
    if converts(kind):
        stage = convert_rows(kind, words, stage, step, mixed, width, rows)
        source, stride = step.input, step.input_stride
    stage = multiply(
        kind,
        words,
        stage,
        step,
        matrices[first + ATTENTION_OUT],
        source,
        stride,
        rows,
        hidden,
        4 * model.hidden,
        scratch,
    )
    stage = norm_rows(kind, words, stage, model, step, layer.attention_norm, hidden, rows, scratch)
    stage = multiply(
        kind,
        words,
        stage,
        step,
        matrices[first + GATE_UP],
        step.input,
        step.input_stride,
        rows,
        step.inner,
        4 * model.inner,
        scratch,
    )
    source, stride = step.inner, 4 * model.inner
    if converts(kind):
        stage = convert_rows(kind, words, stage, step, step.inner, model.inner, rows)
        source, stride = step.input, step.input_stride
    return multiply(
        kind,
        words,
        stage,
        step,
        matrices[first + DOWN],
        source,
        stride,
        rows,
        hidden,
        4 * model.hidden,
        scratch,
    )


def _compiled(digest: int) -> Callable[..., None]:
    """The step's function. Compiling takes seconds, so it is kept on disk, by sources and processor.

    numba keys what it keeps by the function's own file and what the function closes over: the digest stands
    for all other files.
    """

    def take_part(
        kinds: Any,
        words: int,
        models: Any,
        layers: Any,
        matrices: Any,
        steps: Any,
        thread: int,
        number: int,
    ) -> None:
        """Thread 0 leads step `number` (1, 2, ...) and returns. Others help in all until `crew.stop`."""
        if digest == 0:  # never so: the digest has to be part of the function
            return
        stages = STAGES_PER_LAYER * models[0].layers + OTHER_STAGES
        seen = 0
        while True:
            if thread == 0:
                crew.open_step(words, stages, number)
                inside = True
            else:
                seen = crew.next_step(words, seen)
                if seen == crew.STOP:
                    return
                inside = crew.enter(words, seen)
            if inside:
                _run_stages(kinds, words, models, layers, matrices, steps, thread)
            if thread == 0:
                crew.close_step(words)
                return
            crew.leave(words)

    try:
        return njit(take_part, nogil=True, cache=True)
    except RuntimeError:  # numba finds no folder that it may write to
        return njit(take_part, nogil=True)


def _digest() -> int:
    """A number that changes with any source file of this package."""
    sources = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return int.from_bytes(sources.digest(), "big")


take_part = _compiled(_digest())
