"""The records by which the compiled step finds the model, its layers and the batch: addresses and sizes.

Owns the field names that Python fills and numba reads. Holds no memory: whoever fills an address keeps what
it points to alive.
"""

from __future__ import annotations

import numpy as np


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, np.int64) for name in names]


# A matrix in panels of 16 outputs. `scales` are int8's, fp32, one an output; 0: none.
MATRIX = np.dtype(_integers("address", "panels", "panel_bytes", "steps", "scales", "bias", "outcome"))
# What becomes of a matrix's outputs: they are stored, added to what is there, or gate and up are joined.
STORE, ADD, SILU = range(3)
# A layer's matrices follow one another in the table of matrices; the logits' is the last.
MATRICES_PER_LAYER = 4
QUERY_KEY_VALUE, ATTENTION_OUT, GATE_UP, DOWN = range(MATRICES_PER_LAYER)
OUTCOMES = (STORE, ADD, SILU, ADD)

LAYER = np.dtype(
    [
        *_integers("input_norm", "attention_norm", "query_norm", "key_norm"),  # fp32; 0: no such norm
        *_integers("window"),  # tokens that a token sees, itself included; 0: all
        *_integers("key_cache", "value_cache"),
    ]
)

MODEL = np.dtype(
    [
        *_integers("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "final_norm"),
        *_integers("embedding", "cosines", "sines"),  # fp32 [positions, head_dim / 2]
        ("epsilon", np.float64),
        ("scale", np.float64),  # of attention scores
    ]
)

STEP = np.dtype(
    [
        *_integers("tokens", "sampled", "block_size"),
        *_integers("token_ids", "positions", "slots", "logit_rows"),  # int64
        *_integers("query_starts", "seq_lens", "tables", "table_width"),  # int32
        # Attention's units of work: int64 row, first token in the row and number of tokens.
        *_integers("units", "unit_rows", "unit_firsts", "unit_tokens"),
        *_integers("longest"),  # tokens of the longest row
        # Columns of `prefixes.py`, int64, and the states that its units leave, fp32. No units: none is read.
        *_integers("prefix_units", "prefix_rows", "prefix_starts", "prefix_ends", "prefix_firsts"),
        *_integers("prefix_counts", "prefix_states", "prefix_tokens", "prefix_lengths"),
        *_integers("part_starts", "part_units", "part_tokens", "states"),
        *_integers("hidden", "input", "input_stride", "input_scales", "projected", "mixed", "inner"),
        *_integers("picked_hidden", "picked_mixed", "logits"),
        *_integers("threads", "scratch", "scratch_bytes"),  # scratch: each thread has its own
    ]
)
