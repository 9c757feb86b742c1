"""What this processor's vector unit offers, and what follows from it for packed weights.

Owns the choice of instructions. It is made once, from the processor, so that packing and kernels agree.
"""

from __future__ import annotations

import llvmlite.binding as llvm

_FEATURES = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)

HAS_AVX2 = "avx2" in _FEATURES
HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl"} <= _FEATURES
HAS_BF16_DOT = HAS_AVX512 and "avx512bf16" in _FEATURES
HAS_INT8_DOT = HAS_AVX512 and "avx512vnni" in _FEATURES

# Output features of a panel: the lanes of a vector. Two registers of AVX2, one of AVX-512.
LANES = 16
# Rows whose sums stay in registers: 6 x 2 of AVX2's 16, 14 x 1 of AVX-512's 32.
MAX_TILE_ROWS = 14 if HAS_AVX512 else 6
