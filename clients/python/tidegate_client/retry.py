"""When a failed call is tried again, and after what time.

Owns the policy and its count of attempts. Sleeps nowhere and sends nothing.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tidegate_client.errors import OverloadedError, TidegateError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries again while nothing has been delivered: UNAVAILABLE after a jittered, growing pause, and
    RESOURCE_EXHAUSTED after the time that the server names. Anything else is never tried again.

    A stream that the scheduler has accepted and that breaks because the scheduler ended goes on where it
    broke, if a scheduler that has its journal comes back in time.
    """

    max_attempts: int = 4
    """Attempts in all."""
    initial_backoff_s: float = 0.1
    """Longest first pause; each later one may be twice as long."""
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 30.0
    """A server that names a longer time is not waited for."""
    reattach_s: float = 60.0
    """Longest time to wait for a scheduler to come back to a stream that broke. 0: not at all."""

    def pause_s(self, error: TidegateError, attempt: int) -> float | None:
        """Returns how long to wait after the failure of attempt 1, 2, ...; None: do not try again."""
        if attempt >= self.max_attempts:
            return None
        asked_s = error.retry_after_s
        if asked_s is not None and asked_s > self.max_retry_after_s:
            return None
        if isinstance(error, OverloadedError):
            # Those who were refused together should not come back together: up to a tenth later.
            return None if asked_s is None else asked_s * random.uniform(1.0, 1.1)
        if isinstance(error, UnavailableError):
            return max(asked_s or 0.0, self.backoff_s(attempt))
        return None

    def backoff_s(self, attempt: int) -> float:
        """Returns the jittered pause after attempt 1, 2, ..., whatever the server asks for."""
        ceiling_s = min(self.max_backoff_s, self.initial_backoff_s * 2 ** min(attempt - 1, 16))
        return random.uniform(ceiling_s / 2, ceiling_s)


class Attempts:
    """The attempts at one call, which share one deadline."""

    def __init__(self, policy: RetryPolicy | None, timeout_s: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._count = 1

    def remaining_s(self) -> float | None:
        """Returns the time left for the attempt that starts now. None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def policy(self) -> RetryPolicy | None:
        """The policy; None: nothing is tried again."""
        return self._policy

    def pause_s(self, error: TidegateError) -> float:
        """Returns how long to wait before the next attempt, or raises `error` if there is to be none."""
        pause_s = self._policy.pause_s(error, self._count) if self._policy else None
        if pause_s is None:
            raise error
        remaining_s = self.remaining_s()
        if remaining_s is not None and pause_s >= remaining_s:
            raise error
        self._count += 1
        return pause_s
