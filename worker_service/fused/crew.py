"""A few threads that share one step's work: stages in order, items of a stage to whoever is free.

Owns the words that the threads share and how they wait. Knows nothing of what an item computes.

A stage is over when all its items are done, not when all threads have come by: a thread that another process
keeps from its core takes no item, and nobody waits for it. A thread that must wait spins a few microseconds,
then sleeps, so that its core goes to the thread that holds the last item, or to a neighbour.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from worker_service.fused.crew_words import (
    atomic_add,
    atomic_load,
    atomic_store,
    cycles,
    pause,
    sleep_while,
    wake_all,
)

# Words lie a cache line or more apart, so that threads do not fight over lines.
_LINE = 128
_STEP, _INSIDE, _SLEEPERS, _OPEN, _OPENED = (_LINE * line for line in range(5))
_FIRST_STAGE = 5 * _LINE
# A stage has one line with the items taken, and one with those done and, behind that, the time of the last.
_STAGE = 2 * _LINE
_TIME = 8
STOP = -1
# About 7 microseconds, the end of most stages. A thread that sleeps is back 20 later, so that fewer cost one
# stream some per cent; more keep the core from the thread that holds the last item, beside a busy process.
_SPINS = 200


def words_for(stages: int) -> npt.NDArray[np.int64]:
    """Zeroed words for up to so many stages, on a cache line's border."""
    count = (_FIRST_STAGE + stages * _STAGE) // 8
    raw = np.zeros(count + _LINE // 8, np.int64)
    skip = (-raw.ctypes.data % _LINE) // 8
    return raw[skip : skip + count]


def stage_cycles(words: npt.NDArray[np.int64], stages: int) -> npt.NDArray[np.int64]:
    """How long each of the last step's first `stages` stages took, from the end of the one before."""
    first = (_FIRST_STAGE + _LINE + _TIME) // 8
    ends = words[first : first + stages * _STAGE // 8 : _STAGE // 8]
    return np.diff(ends, prepend=words[_OPENED // 8])


@njit(nogil=True, inline="always")
def open_step(words: int, stages: int, number: int) -> None:
    """The leader starts step `number` (from 1), which has so many stages, and wakes the others."""
    for stage in range(stages):
        first = words + _FIRST_STAGE + stage * _STAGE
        atomic_store(first, 0)
        atomic_store(first + _LINE, 0)
    atomic_store(words + _OPENED, cycles())
    atomic_store(words + _OPEN, number)
    atomic_store(words + _STEP, number)
    wake_all(words + _STEP)


@njit(nogil=True, inline="always")
def close_step(words: int) -> None:
    """The leader ends the step: returns when nobody is inside any more, and lets no latecomer in."""
    atomic_store(words + _OPEN, 0)
    _wait_until(words, words + _INSIDE, 0)


@njit(nogil=True, inline="always")
def stop(words: int) -> None:
    """Sends the others home."""
    atomic_store(words + _STEP, STOP)
    wake_all(words + _STEP)


@njit(nogil=True, inline="always")
def next_step(words: int, seen: int) -> int:
    """A follower sleeps until there is a step other than `seen`, and gets its number, or STOP."""
    step = words + _STEP
    while atomic_load(step) == seen:
        sleep_while(step, seen)
    return atomic_load(step)


@njit(nogil=True, inline="always")
def enter(words: int, number: int) -> bool:
    """A follower goes in. False when the step is over already: leave at once."""
    atomic_add(words + _INSIDE, 1)
    return atomic_load(words + _OPEN) == number


@njit(nogil=True, inline="always")
def leave(words: int) -> None:
    """A follower has gone through all stages."""
    if atomic_add(words + _INSIDE, -1) == 1 and atomic_load(words + _SLEEPERS) > 0:
        wake_all(words + _INSIDE)


@njit(nogil=True, inline="always")
def take(words: int, stage: int) -> int:
    """The next item of a stage that nobody has taken. The caller compares it with the number of items."""
    return atomic_add(words + _FIRST_STAGE + stage * _STAGE, 1)


@njit(nogil=True, inline="always")
def finish(words: int, stage: int, items: int) -> None:
    """Says that a taken item is done; whoever does the last notes the time and wakes those who sleep."""
    done = words + _FIRST_STAGE + stage * _STAGE + _LINE
    if atomic_add(done, 1) + 1 == items:
        atomic_store(done + _TIME, cycles())
        if atomic_load(words + _SLEEPERS) > 0:
            wake_all(done)


@njit(nogil=True, inline="always")
def wait(words: int, stage: int, items: int) -> None:
    """Returns when all items of a stage are done."""
    _wait_until(words, words + _FIRST_STAGE + stage * _STAGE + _LINE, items)


@njit(nogil=True)
def _wait_until(words: int, address: int, value: int) -> None:
    for _ in range(_SPINS):
        if atomic_load(address) == value:
            return
        pause()
    atomic_add(words + _SLEEPERS, 1)
    seen = atomic_load(address)
    while seen != value:
        sleep_while(address, seen)
        seen = atomic_load(address)
    atomic_add(words + _SLEEPERS, -1)
