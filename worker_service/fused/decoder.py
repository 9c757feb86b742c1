"""The fused decoder: one compiled call a step, for the Llama family on a CPU.

Owns a model's packed weights, the step's workspace and the threads that help. Knows nothing of plans, slots
or sampling: it is given a flat batch and KV tensors, and returns logits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.fused import crew, layers, llama, packing, records
from worker_service.fused.crew import words_for
from worker_service.fused.rotary import RotaryTable
from worker_service.fused.step import OTHER_STAGES, STAGES_PER_LAYER, stage_names, take_part
from worker_service.fused.workspace import Workspace

KvLayers = Sequence[tuple[Tensor, Tensor]]


class FusedDecoder:
    """A decoder that takes its weights from files, or from a model of transformers, which is empty then.

    `dtype` is the type of its packed weights (float32, bfloat16 or int8); activations between matrices are
    fp32. Ask `llama.unsupported_reason` of a model first. One forward runs at a time.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, threads: int | None = None) -> None:
        weights = model if isinstance(model, llama.Weights) else llama.ModuleWeights(model)
        self.shape = weights.outline.shape
        self.dtype = dtype
        self._rotary = RotaryTable(weights.outline)
        self._layers = list(layers.take_layers(weights, dtype))
        self._logits, self._embedding, self._final_norm = layers.take_vocabulary(weights, dtype)
        self._matrix_records = packing.table([layer.matrices for layer in self._layers], self._logits)
        self._layer_records = self._make_layer_records()
        self._model_records = self._make_model_record()
        self._step_records = np.zeros(1, records.STEP)
        self._workspace = Workspace(self.shape, dtype, threads or torch.get_num_threads())
        self._words = words_for(STAGES_PER_LAYER * self.shape.layers + OTHER_STAGES)
        self._steps = 0
        self._kv: KvLayers | None = None
        self._crew: list[threading.Thread] = []

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights."""
        matrices = [matrix for layer in self._layers for matrix in layer.matrices]
        plain = 0 if self._embedding is None else self._embedding.numel() * self._embedding.element_size()
        return plain + sum(matrix.nbytes for matrix in (*matrices, self._logits))

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        batch: AttentionBatch,
        kv: KvLayers,  # of each layer: keys and values [num_blocks, KVH, block_size, D]
        logit_rows: Tensor,  # [S] int64, flat indices of the tokens whose logits are wanted
    ) -> Tensor:
        """Logits `[S, vocab]` in fp32, valid until the next forward. Writes keys and values to `kv`."""
        self._bind(kv)
        step = self._step_records[0]
        kept = self._workspace.fill(step, input_ids, positions, batch, logit_rows)
        self._model_records["cosines"], self._model_records["sines"] = self._rotary.addresses(
            batch.max_seq_len
        )
        self._steps += 1
        take_part(*self._arguments(), 0, self._steps)
        del kept
        return self._workspace.logits(int(step["sampled"]))

    def warm_up(self, kv: KvLayers) -> None:
        """Compiles the step for this KV, or loads what was compiled, by one token in the null block."""
        one = np.array([0, 1], np.int32)
        batch = AttentionBatch.from_host(one, one[1:], np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
        zero = torch.zeros(1, dtype=torch.int64)
        self.forward(zero, zero, batch, kv, zero)

    def profile(self) -> dict[str, float]:
        """Each kind of stage's share of the last forward's time."""
        converted = packing.converts_activations(self.dtype)
        step = self._step_records[0]
        windows = [0 < layer.window < step["longest"] for layer in self._layers]
        names = stage_names(windows, converted, bool(step["sampled"]), bool(step["prefix_units"]))
        cycles = crew.stage_cycles(self._words, len(names))
        shares = dict.fromkeys(names, 0.0)
        for name, count in zip(names, cycles.tolist(), strict=True):
            shares[name] += count / int(cycles.sum())
        return shares

    def close(self) -> None:
        """Ends the helping threads. The next forward would start them again."""
        if self._kv is not None:
            self._finalizer()
            self._kv, self._crew = None, []

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self._kinds,
            self._words.ctypes.data,
            self._model_records,
            self._layer_records,
            self._matrix_records,
            self._step_records,
        )

    def _bind(self, kv: KvLayers) -> None:
        """Checks the KV, points the layers at it and starts the crew, unless it is last time's."""
        if kv is self._kv:
            return
        shape = self.shape
        blocks, _, block_size, _ = kv[0][0].shape
        expected = (blocks, shape.kv_heads, block_size, shape.head_dim)
        dtype = kv[0][0].dtype
        for tensor in (tensor for pair in kv for tensor in pair):
            if tensor.shape != expected or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"KV tensors must be contiguous {expected} of {dtype}, "
                    f"got {tuple(tensor.shape)} of {tensor.dtype}"
                )
        if len(kv) != shape.layers or dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{shape.layers} layers of fp32 or bf16 KV are needed, got {len(kv)} of {dtype}")
        self.close()
        self._layer_records["key_cache"] = [keys.data_ptr() for keys, _ in kv]
        self._layer_records["value_cache"] = [values.data_ptr() for _, values in kv]
        self._step_records["block_size"] = block_size
        types = (self.dtype, layers.embedding_dtype(self.dtype), dtype)
        self._kinds = tuple(packing.kind_of(kind) for kind in types)
        self._kv = kv
        self._start_crew()

    def _start_crew(self) -> None:
        self._words[:] = 0
        self._steps = 0
        arguments = self._arguments()
        self._crew = [
            threading.Thread(
                target=take_part, args=(*arguments, thread, 0), name=f"fused-{thread}", daemon=True
            )
            for thread in range(1, self._workspace.threads)
        ]
        for thread in self._crew:
            thread.start()
        self._finalizer = weakref.finalize(self, _dismiss, self._words, self._crew)

    def _make_layer_records(self) -> npt.NDArray[np.void]:
        table = np.zeros(self.shape.layers, records.LAYER)
        for record, layer in zip(table, self._layers, strict=True):
            for name in ("input_norm", "attention_norm", "query_norm", "key_norm"):
                weights: Tensor | None = getattr(layer, name)
                record[name] = 0 if weights is None else weights.data_ptr()
            record["window"] = layer.window
        return table

    def _make_model_record(self) -> npt.NDArray[np.void]:
        table = np.zeros(1, records.MODEL)
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "epsilon", "scale"):
            table[name] = getattr(self.shape, name)
        table["final_norm"] = self._final_norm.data_ptr()
        table["embedding"] = 0 if self._embedding is None else self._embedding.data_ptr()
        return table


def _dismiss(words: npt.NDArray[np.int64], threads: list[threading.Thread]) -> None:
    crew.stop(words.ctypes.data)
    for thread in threads:
        thread.join()
