"""Owns what is recorded of the core: each call that changes it, with the digest of each plan that it gave.

No text and no token is in a recording, unless tokens are asked for. Each token is replaced by a keyed hash of
all tokens up to it, so that equal prefixes stay equal and nothing else shows; the key is thrown away. That
costs about a microsecond for each token.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from scheduler_service.core.admission import Accepted, Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Event, Finished
from scheduler_service.core.request import Request, RequestSpec
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import Int32, StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.logs import EventLog
from scheduler_service.recording_file import Record, RecordingWriter

_FLUSH_EVERY_S = 1.0
_log = EventLog("recording")


class Recorder:
    """One recording, of one core after another. Also the mapping from tokens to what stands for them."""

    def __init__(self, writer: RecordingWriter, keep_tokens: bool = False) -> None:
        """`keep_tokens`: tokens are written as they are, so that whoever has the tokenizer can read them."""
        self.has_stopped = False
        """Whether it ended before the process, since the file can't be written."""
        self._writer = writer
        self._keep_tokens = keep_tokens
        self._root = blake2b(digest_size=8, key=secrets.token_bytes(32))

    def new_core(self, config: SchedulerConfig) -> Scheduler:
        """A core whose calls are recorded."""
        return RecordedScheduler(config, self)

    def write(self, record: Record) -> None:
        """Adds a call. The service goes on where the file can't be written, and the recording ends."""
        self._attempt(lambda: self._writer.write(record))

    def salted(self, text: str) -> str:
        """What stands for a secret: equal for equal ones."""
        return blake2b(text.encode(), digest_size=8, key=self._root.digest()).hexdigest() if text else ""

    def chain(self) -> TokenChain:
        """The beginning of a sequence."""
        return TokenChain(None if self._keep_tokens else self._root.copy())

    async def flush_often(self) -> None:
        """Has all in the file each second, until cancelled, so that a kill loses no more than that."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            self._attempt(self._writer.flush)

    def close(self) -> None:
        """Ends the recording."""
        self._attempt(self._writer.close)

    def _attempt(self, write: Callable[[], None]) -> None:
        if self.has_stopped:
            return
        try:
            write()
            return
        except OSError as failure:
            reason = failure.strerror or str(failure)
        self.has_stopped = True
        _log.error(
            "recording_stopped",
            path=str(self._writer.path),
            reason=reason,
            bytes_written=self._writer.num_bytes,
            remedy="the service goes on and the file can be replayed up to here; to record again, make room "
            "and restart with --record and another file",
        )


class TokenChain:
    """A sequence of tokens, and what stands for each: a number from 2^30 up to 2^31, or itself."""

    def __init__(self, state: blake2b | None) -> None:
        """None: tokens stand for themselves."""
        self._state = state

    def extend(self, token_ids: Iterable[int]) -> list[int]:
        """What stands for the tokens that follow."""
        state = self._state
        if state is None:
            return list(token_ids)
        names = []
        for token_id in token_ids:
            state.update(token_id.to_bytes(4, "little"))
            names.append(int.from_bytes(state.digest()[:4], "little") & 0x3FFFFFFF | 0x40000000)
        return names

    def copy(self) -> TokenChain:
        """The same sequence, to go on otherwise."""
        return TokenChain(self._state and self._state.copy())


class RecordedScheduler(Scheduler):
    """A scheduler that writes down each call that changes it."""

    def __init__(self, config: SchedulerConfig, recorder: Recorder) -> None:
        super().__init__(config)
        self._recorder = recorder
        self._chains: dict[tuple[str, int], TokenChain] = {}  # of live candidates
        options = {
            each.name: getattr(config, each.name) for each in fields(config) if each.name != "hash_key"
        }
        self._write("new", {**options, "tenant_weights": dict(config.tenant_weights)})

    def _write(self, *record: Any) -> None:
        self._recorder.write(list(record))

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        """See Scheduler."""
        super().add_worker(spec, now)
        self._write("add_worker", now, asdict(spec))

    def remove_worker(self, worker_id: str, now: float) -> list[Event]:
        """See Scheduler."""
        self._write("remove_worker", now, worker_id)
        return self._forget_ended(super().remove_worker(worker_id, now))

    def drain_worker(self, worker_id: str, now: float) -> list[Event]:
        """See Scheduler."""
        events = super().drain_worker(worker_id, now)
        self._write("drain_worker", now, worker_id)
        return events

    def start_draining(self) -> None:
        """See Scheduler."""
        self._write("start_draining")
        super().start_draining()

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Refused:
        """See Scheduler."""
        outcome = super().submit(spec, now)
        self._note_request("submit", spec, now, [()] * spec.n, outcome)
        return outcome

    def restore(
        self, spec: RequestSpec, outputs: Sequence[Sequence[int] | None], now: float
    ) -> Accepted | Refused:
        """See Scheduler."""
        outcome = super().restore(spec, outputs, now)
        self._note_request("restore", spec, now, outputs, outcome)
        return outcome

    def _note_request(
        self,
        call: str,
        spec: RequestSpec,
        now: float,
        outputs: Sequence[Sequence[int] | None],
        outcome: Accepted | Refused,
    ) -> None:
        if self._recorder.has_stopped:
            return
        chain = self._recorder.chain()
        prompt = chain.extend(spec.prompt_token_ids.tolist())
        given: list[list[int] | None] = []
        for index, tokens in enumerate(outputs):
            own = chain.copy()
            given.append(None if tokens is None else own.extend(tokens))
            if isinstance(outcome, Accepted) and tokens is not None:
                self._chains[spec.request_id, index] = own
        values = {
            "request_id": spec.request_id,
            "model": spec.model,
            "n": spec.n,
            "priority": spec.priority,
            "tenant": spec.tenant,
            "cache_salt": self._recorder.salted(spec.cache_salt),
            "adapter": spec.adapter,
            "grammar": self._recorder.salted(spec.grammar),
            "arrival": spec.arrival,
            "deadline": spec.deadline,
            "queue_timeout_s": spec.queue_timeout_s,
        }
        stopping = [spec.stopping.max_tokens, spec.stopping.min_tokens]
        self._write(call, now, values, pack(prompt), stopping, given, outcome_name(outcome))

    def cancel(self, request_id: str, now: float, index: int | None = None) -> list[Event]:
        """See Scheduler."""
        self._write("cancel", now, request_id, index)
        return self._forget_ended(super().cancel(request_id, now, index))

    def stop(self, request_id: str, index: int, num_tokens: int, now: float) -> list[Event]:
        """See Scheduler."""
        events = super().stop(request_id, index, num_tokens, now)
        self._write("stop", now, request_id, index, num_tokens)
        return self._forget_ended(events)

    def plan(self, worker_id: str, now: float) -> StepPlan | None:
        """See Scheduler. A worker without credit is not asked, so that is not recorded."""
        worker = self._worker(worker_id)
        if len(worker.in_flight) >= worker.depth:
            return None
        plan = super().plan(worker_id, now)
        self._write("plan", now, worker_id, plan_digest(plan))
        return plan

    def apply(self, worker_id: str, result: StepResult, now: float) -> list[Event]:
        """See Scheduler. What breaks the protocol changes nothing, so it is not recorded."""
        in_flight = self._worker(worker_id).in_flight
        asked = list(in_flight[0].requests) if in_flight else []
        finished = [request.finished for request in asked]
        events = super().apply(worker_id, result, now)
        token_ids: list[int] = []
        stops: list[list[Any]] = []
        rows = zip(asked, finished, result.token_ids.tolist(), strict=True)
        for row, (request, ended, token_id) in enumerate(rows):
            chain = None if ended else self._chains.get((request.request_id, request.index))
            if chain is None or row in result.failed_rows:
                token_ids.append(0)
                continue
            (name,) = chain.extend([token_id])
            token_ids.append(name)
            if _is_stop(request, token_id):
                stops.append([request.request_id, name])
        slots, failed = result.slots.tolist(), sorted(result.failed_rows)
        step = (result.seq, slots, token_ids, failed, stops, result.compute_ms)
        self._write("apply", now, worker_id, *step)
        return self._forget_ended(events)

    def expire(self, now: float) -> list[Event]:
        """See Scheduler."""
        self._write("expire", now)
        return self._forget_ended(super().expire(now))

    def reset_prefix_cache(self) -> int:
        """See Scheduler."""
        self._write("reset_prefix_cache")
        return super().reset_prefix_cache()

    def _forget_ended(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Finished):
                self._chains.pop((event.request_id, event.index), None)
        return events


def _is_stop(request: Request, token_id: int) -> bool:
    stopping = request.spec.stopping
    return token_id in stopping.eos_token_ids or token_id in stopping.stop_token_ids


def pack(values: Sequence[int]) -> str:
    """Numbers of 32 bits as text."""
    return b64encode(np.array(values, "<i4").tobytes()).decode()


def outcome_name(outcome: Accepted | Refused) -> str:
    """What a submit gave, in a word."""
    return "accepted" if isinstance(outcome, Accepted) else outcome.reason.value


def plan_digest(plan: StepPlan | None) -> int | None:
    """A number that differs where plans differ. Tokens and sampling are left out: they are the request's."""
    if plan is None:
        return None
    admitted = [
        (a.slot, a.request_id, a.index, a.num_prompt_tokens, a.num_computed_tokens, a.block_ids.tolist())
        for a in plan.admitted
    ]
    digest = zlib.crc32(repr((plan.seq, admitted)).encode())
    columns: tuple[Int32, ...] = (
        plan.released,
        plan.copy_sources,
        plan.copy_destinations,
        plan.slots,
        plan.num_tokens,
        plan.block_rows,
        plan.block_ids,
    )
    swaps = (plan.swap_out_blocks, plan.swap_out_host_blocks, plan.swap_in_host_blocks, plan.swap_in_blocks)
    # Where nothing is swapped, digests are those of recordings from before there were swaps.
    for column in (*columns, *swaps) if any(map(len, swaps)) else columns:
        digest = zlib.crc32(len(column).to_bytes(4, "little") + column.tobytes(), digest)
    return digest
