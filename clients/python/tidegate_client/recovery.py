"""What becomes of a stream whose call failed: it is started again, goes on at a new scheduler, or ends.

Owns that decision. Sleeps nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.errors import AlreadyExistsError, NotFoundError, TidegateError, UnavailableError
from tidegate_client.retry import Attempts, RetryPolicy
from tidegate_client.types import Admitted

_REQUEST_ID_METADATA = "tidegate-request-id"
# What the server says when it is still there is no reason to wait for another one.
_LOSS_REASONS = ("", "ENGINE_LOST")


@dataclass(frozen=True, slots=True)
class Calls:
    """How a stream's RPCs are started; each takes the time limit in seconds and returns gRPC's call."""

    generate: Callable[[float | None], Any]
    attach: Callable[[pb.AttachRequest, float | None], Any]
    several: bool = False
    """Whether they may go to any of several schedulers, of which one has the request."""


class StreamState(Protocol):
    """What is asked of a stream."""

    admitted: Admitted | None

    def has_begun(self) -> bool:
        """Whether anything has come."""

    def received(self) -> list[pb.Received]:
        """How much has come of each candidate."""


class Recovery:
    """Decides after each failure of a stream's calls."""

    def __init__(self, calls: Calls, attempts: Attempts, stream: StreamState) -> None:
        self._calls = calls
        self._attempts = attempts
        self._stream = stream
        self._request_id = ""  # as soon as the server has accepted the request
        self._loss: TidegateError | None = None  # what broke the stream that is to go on
        self._give_up_at = 0.0
        self._num_tries = 0

    def note_progress(self) -> None:
        """An event has come."""
        self._loss = None

    def pause_s(self, error: TidegateError, metadata: Sequence[tuple[str, str | bytes]] | None) -> float:
        """Returns how long to wait before next_call() after a call failed, or raises what ends the stream.

        metadata: the call's initial metadata.
        """
        if self._loss is not None:
            return self._pause_after_attaching(error, self._loss)
        self._request_id = self._name(metadata) or self._request_id
        policy = self._attempts.policy
        is_loss = isinstance(error, UnavailableError) and error.reason in _LOSS_REASONS
        if policy is not None and policy.reattach_s and is_loss and self._request_id:
            self._loss = error
            self._give_up_at = time.monotonic() + policy.reattach_s
            self._num_tries = 0
            return self._wait(policy, error)
        if self._stream.has_begun():
            raise error from None
        return self._attempts.pause_s(error)

    def next_call(self) -> Any:
        """Starts the call that follows the pause."""
        remaining_s = self._attempts.remaining_s()
        if self._loss is None:
            return self._calls.generate(remaining_s)
        request = pb.AttachRequest(request_id=self._request_id, received=self._stream.received())
        return self._calls.attach(request, remaining_s)

    def _name(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
        if self._stream.admitted is not None:
            return self._stream.admitted.request_id
        names = [str(value) for key, value in metadata or () if key == _REQUEST_ID_METADATA]
        return names[0] if names else ""

    def _pause_after_attaching(self, error: TidegateError, loss: TidegateError) -> float:
        policy = self._attempts.policy
        assert policy is not None  # noqa: S101 - else nothing would have been attached to
        # A scheduler that has not yet noticed that the old stream broke says that it has the request.
        if isinstance(error, UnavailableError | AlreadyExistsError):
            return self._wait(policy, loss)
        is_unknown = isinstance(error, NotFoundError) or error.code == "UNIMPLEMENTED"
        if not is_unknown:
            raise error from None
        if self._stream.has_begun():
            if self._calls.several:  # another one may know it, now or when it is back
                return self._wait(policy, loss)
            raise loss from None
        # It was accepted, and the scheduler ended before it was kept.
        self._loss = None
        self._request_id = ""
        return self._attempts.pause_s(loss)

    def _wait(self, policy: RetryPolicy, loss: TidegateError) -> float:
        self._num_tries += 1
        pause_s = policy.backoff_s(self._num_tries)
        remaining_s = self._attempts.remaining_s()
        if time.monotonic() + pause_s > self._give_up_at or (
            remaining_s is not None and pause_s >= remaining_s
        ):
            raise loss from None
        return pause_s
