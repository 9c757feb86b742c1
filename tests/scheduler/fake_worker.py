"""A worker without a model, for tests: real gRPC, real slot and block bookkeeping, tokens from a hash.

It models KV memory as chains of hashes: a position's entry stands for all tokens up to it. A step writes the
entries of all its rows and then reads those of whole sequences, as each layer of a model does. So a wrong,
stale or overwritten block is noticed, as it would be by attention.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np

from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc as pb_grpc


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """The token that any fake worker samples at `position` of a sequence."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(seed: int, prompt_tokens: int, max_tokens: int, vocab_size: int) -> list[int]:
    """Outputs of a request that no end-of-text token ends."""
    return [token_at(seed, prompt_tokens + i, vocab_size) for i in range(max_tokens)]


class RuleBrokenError(Exception):
    """A plan broke a rule of the step protocol."""


@dataclass
class FakeSlot:
    name: str
    tokens: list[int]
    computed: int
    blocks: list[int]
    seed: int
    logprobs: int
    chain: list[int] = field(default_factory=list)  # what KV memory should hold, for each known token

    def extend_chain(self) -> None:
        for token in self.tokens[len(self.chain) :]:
            self.chain.append(hash((self.chain[-1] if self.chain else 0, token)))


@dataclass
class Faults:
    """How a worker misbehaves. None of it by default."""

    edit_hello: Callable[[pb.WorkerHello], None] | None = None
    edit_result: Callable[[pb.StepResult], None] | None = None
    stall_at_seq: int | None = None  # answers nothing from this step on, on every stream
    silent_hello: bool = False
    die_at_seq: int | None = None  # ends the stream with INTERNAL at this step, once


@dataclass
class FakeWorker(pb_grpc.WorkerServiceServicer):
    model: str = "fake"
    fingerprint: str = "fp-1"
    vocab_size: int = 1000
    max_model_len: int = 512
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 4
    num_blocks: int = 257
    num_slots: int = 64
    max_batched_tokens: int = 4096
    max_in_flight: int = 2
    step_delay_s: float = 0.0
    faults: Faults = field(default_factory=Faults)
    tokenizer: pb.TokenizerFiles = field(default_factory=pb.TokenizerFiles)

    address: str = ""
    violations: list[str] = field(default_factory=list)
    hellos: list[pb.SchedulerHello] = field(default_factory=list)
    plans: list[pb.StepPlan] = field(default_factory=list)
    notices: list[pb.TraceNotice] = field(default_factory=list)
    streams: int = 0

    def __post_init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self._server: grpc.aio.Server | None = None
        self._slots: dict[int, FakeSlot] = {}
        self._kv: dict[int, list[int]] = {}
        self._superseded = asyncio.Event()

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ]
        )
        pb_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        return self.address

    async def stop(self, grace: float | None = None) -> None:
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def live_slots(self) -> int:
        return len(self._slots)

    async def Execute(self, request_iterator, context) -> None:
        hello = (await context.read()).hello
        newest = max((earlier.scheduler_epoch for earlier in self.hellos), default=0)
        if hello.scheduler_epoch <= newest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale epoch")
        self._superseded.set()
        self._superseded = superseded = asyncio.Event()
        self.hellos.append(hello)
        self.streams += 1
        self._slots.clear()
        serving = asyncio.create_task(self._serve(context, hello.scheduler_epoch))
        waiting = asyncio.create_task(superseded.wait())
        try:
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if superseded.is_set():
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer stream took over")
            await serving
        finally:
            serving.cancel()
            waiting.cancel()

    async def _serve(self, context, epoch: int) -> None:
        if self.faults.silent_hello:
            await asyncio.Event().wait()
        await context.write(pb.ExecuteResponse(hello=self._hello(epoch)))
        seq = 0
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.HasField("notice"):
                self.notices.append(request.notice)
                continue
            plan = request.plan
            received_ns = time.monotonic_ns()
            self.plans.append(plan)
            if self.faults.stall_at_seq is not None and plan.seq >= self.faults.stall_at_seq:
                await asyncio.Event().wait()
            if self.faults.die_at_seq == plan.seq:
                self.faults.die_at_seq = None
                await context.abort(grpc.StatusCode.INTERNAL, "the forward failed")
            if self.step_delay_s:
                await asyncio.sleep(self.step_delay_s)
            try:
                seq += 1
                if plan.seq != seq:
                    raise RuleBrokenError(f"seq is {plan.seq}, not {seq}")
                result = self._step(plan)
            except RuleBrokenError as error:
                self.violations.append(str(error))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            now_ns = time.monotonic_ns()
            result.timings.received_ns = received_ns
            result.timings.started_ns = received_ns
            result.timings.forward_ns = result.timings.sampling_ns = result.timings.finished_ns = now_ns
            if self.faults.edit_result is not None:
                self.faults.edit_result(result)
            await context.write(pb.ExecuteResponse(result=result))

    async def GetStatus(self, request, context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(phase=pb.WORKER_PHASE_SERVING, incarnation=self.incarnation)

    def _hello(self, epoch: int) -> pb.WorkerHello:
        hello = pb.WorkerHello(
            protocol_version=1,
            scheduler_epoch=epoch,
            incarnation=self.incarnation,
            model=pb.ModelInfo(
                name=self.model,
                fingerprint=self.fingerprint,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self.tokenizer,
                dtype="float32",
                kv_bytes_per_token=1,
            ),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            max_batched_tokens=self.max_batched_tokens,
            max_in_flight=self.max_in_flight,
        )
        if self.faults.edit_hello is not None:
            self.faults.edit_hello(hello)
        return hello

    def _step(self, plan: pb.StepPlan) -> pb.StepResult:
        for slot in _ints(plan.released):
            self._release(slot)
        sources = [list(self._block(block)) for block in _ints(plan.copy_sources)]
        for content, destination in zip(sources, _ints(plan.copy_destinations), strict=True):
            self._block(destination)[:] = content
        for admitted in plan.admitted:
            self._admit(admitted)
        slots, counts = _ints(plan.slots), _ints(plan.num_tokens)
        if len(set(slots)) != len(slots):
            raise RuleBrokenError("a slot has two rows")
        if sum(counts) > self.max_batched_tokens:
            raise RuleBrokenError(f"{sum(counts)} tokens in a plan, {self.max_batched_tokens} allowed")
        for row, block in zip(_ints(plan.block_rows), _ints(plan.block_ids), strict=True):
            self._slot(slots[row]).blocks.append(block)
        for slot, count in zip(slots, counts, strict=True):
            self._write(self._slot(slot), count)
        for slot in slots:
            self._attend(self._slots[slot])
        rows = [slot for slot in slots if self._slots[slot].computed == len(self._slots[slot].tokens)]
        return self._sample(plan.seq, rows)

    def _admit(self, admitted: pb.AdmittedRequest) -> None:
        if admitted.slot in self._slots or not 0 <= admitted.slot < self.num_slots:
            raise RuleBrokenError(f"slot {admitted.slot} is taken, or out of range")
        slot = FakeSlot(
            name=admitted.request_id,
            tokens=_ints(admitted.token_ids),
            computed=admitted.num_computed_tokens,
            blocks=_ints(admitted.block_ids),
            seed=admitted.sampling.seed,
            logprobs=admitted.sampling.logprobs,
        )
        self._slots[admitted.slot] = slot

    def _release(self, number: int) -> None:
        self._slot(number)
        del self._slots[number]

    def _write(self, slot: FakeSlot, count: int) -> None:
        if count < 1 or slot.computed + count > len(slot.tokens):
            raise RuleBrokenError(
                f"{slot.name}: {slot.computed} + {count} of {len(slot.tokens)} known tokens"
            )
        slot.extend_chain()
        for position in range(slot.computed, slot.computed + count):
            index, offset = divmod(position, self.block_size)
            if index >= len(slot.blocks):
                raise RuleBrokenError(f"{slot.name}: no block for position {position}")
            self._block(slot.blocks[index])[offset] = slot.chain[position]
        slot.computed += count

    def _attend(self, slot: FakeSlot) -> None:
        """The KV of every computed position is what this request's tokens give."""
        for start in range(0, slot.computed, self.block_size):
            index, end = start // self.block_size, min(start + self.block_size, slot.computed)
            if self._block(slot.blocks[index])[: end - start] != slot.chain[start:end]:
                raise RuleBrokenError(f"{slot.name}: KV from position {start} on is not this request's")

    def _sample(self, seq: int, sampled: list[int]) -> pb.StepResult:
        tokens = []
        logprob_rows = []
        for row, number in enumerate(sampled):
            slot = self._slots[number]
            tokens.append(token_at(slot.seed, len(slot.tokens), self.vocab_size))
            slot.tokens.append(tokens[-1])
            if slot.logprobs >= 0:
                logprob_rows.append((row, tokens[-1], slot.logprobs))
        result = pb.StepResult(seq=seq, slots=_bytes(sampled), token_ids=_bytes(tokens))
        if logprob_rows:
            top = [[(token + i) % self.vocab_size for i in range(count)] for _, token, count in logprob_rows]
            result.logprobs.rows = _bytes([row for row, _, _ in logprob_rows])
            result.logprobs.sampled = np.full(len(logprob_rows), -0.5, "<f4").tobytes()
            result.logprobs.top_offsets = _bytes([0, *np.cumsum([len(ids) for ids in top])])
            result.logprobs.top_token_ids = _bytes([token for ids in top for token in ids])
            values = [-0.5 - i for ids in top for i in range(len(ids))]
            result.logprobs.top_values = np.array(values, "<f4").tobytes()
        return result

    def _slot(self, number: int) -> FakeSlot:
        if number not in self._slots:
            raise RuleBrokenError(f"slot {number} is empty")
        return self._slots[number]

    def _block(self, block: int) -> list[int]:
        if not 1 <= block < self.num_blocks:
            raise RuleBrokenError(f"block {block} is not in 1 to {self.num_blocks - 1}")
        return self._kv.setdefault(block, [0] * self.block_size)


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


def _bytes(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
