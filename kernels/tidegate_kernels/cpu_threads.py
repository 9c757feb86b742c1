"""Runs a compiled function on several threads at once: on torch's own OpenMP threads where that is possible.

Owns nothing but the call. A second pool of threads beside torch's would fight it for the cores: its threads
spin for a while after each parallel region, and so do torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# void function(void *arguments). ctypes lets go of the GIL while it runs.
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _openmp() -> Callable[..., None] | None:
    """GNU OpenMP's entry point in torch's own runtime (LLVM's and Intel's have it too), or None."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_PARALLEL = _openmp()
_POOL = None if _PARALLEL is not None else ThreadPoolExecutor(thread_name_prefix="tidegate-attention")


def run(address: int, arguments: int, threads: int) -> None:
    """Calls the C function at `address` with the pointer `arguments` on each of `threads` threads, this one
    among them, and returns when all have returned.

    The calls share out the work among themselves. Fewer may run than were asked for.
    """
    function = _FUNCTION(address)
    if threads <= 1:
        function(arguments)
    elif _PARALLEL is not None:
        _PARALLEL(address, arguments, threads, 0)
    elif _POOL is not None:
        others = [_POOL.submit(function, arguments) for _ in range(threads - 1)]
        function(arguments)
        for other in others:
            other.result()
