"""Atomic words and sleeping: what threads that share a step need, for numba code without the GIL.

Owns the LLVM IR of atomics and the operating system's wait and wake. Knows nothing of steps.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import I32, I64, call

# Linux can put a thread to sleep until a word changes. Elsewhere a waiting thread naps and looks again.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_NAP_US = 50
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = platform.machine() in ("aarch64", "arm64")
_ARM_YIELD = 1


def _word(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Adds to a word and returns what it held before."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """What a word holds now."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), emit


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Sets a word."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tells the core that this is a waiting loop."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if _X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif _ARM:
            call(builder, "llvm.aarch64.hint", ir.VoidType(), I32(_ARM_YIELD))
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def cycles(typing_context: Any) -> Any:
    """The processor's counter of cycles, or of a steady clock that counts about as fast."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.readcyclecounter", I64)

    return types.int64(), emit


def _system_call(builder: ir.IRBuilder, address: Any, operation: int, value: Any) -> None:
    if _FUTEX is None:
        call(builder, "usleep", I32, I32(_NAP_US))
        return
    call(builder, "syscall", I64, I64(_FUTEX), address, I64(operation), value, I64(0), I64(0), I64(0))


@intrinsic
def sleep_while(typing_context: Any, address: Any, value: Any) -> Any:
    """Sleeps while the word holds `value`, until woken. May return early: look again."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _system_call(builder, arguments[0], _FUTEX_WAIT_PRIVATE, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def wake_all(typing_context: Any, address: Any) -> Any:
    """Wakes the threads that sleep on the word."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if _FUTEX is not None:
            _system_call(builder, arguments[0], _FUTEX_WAKE_PRIVATE, I64(2**31 - 1))
        return context.get_dummy_value()

    return types.void(types.int64), emit
