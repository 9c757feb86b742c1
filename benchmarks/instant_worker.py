"""A worker without a model, whose steps take no time: random tokens, and the bookkeeping that a plan needs.

Owns just what a benchmark of the scheduler service needs of a worker, as a process of its own.

    python benchmarks/instant_worker.py [--step-ms MS]    # prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from typing import Any

import grpc
import numpy as np
import tokenizers
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc as pb_grpc

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
_NUM_SLOTS = 1024
_NUM_BLOCKS = 200_000
_MAX_BATCHED_TOKENS = 65_536
_MAX_IN_FLIGHT = 4


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer, as most models have, learnt from this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([__file__], trainer)
    return tokenizer


class InstantWorker(pb_grpc.WorkerServiceServicer):
    """WorkerService for one scheduler."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, step_s: float) -> None:
        self._files = pb.TokenizerFiles(tokenizer_json=tokenizer.to_str().encode())
        self._vocab_size = tokenizer.get_vocab_size()
        self._step_s = step_s
        self._uncomputed = np.zeros(_NUM_SLOTS, np.int64)  # known tokens without KV, by slot
        self._random = np.random.default_rng(0)
        self._incarnation = uuid.uuid4().hex

    async def Execute(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serves a scheduler's plans."""
        hello = (await context.read()).hello
        await context.write(pb.ExecuteResponse(hello=self._hello(hello.scheduler_epoch)))
        done_at = time.monotonic()
        while (request := await context.read()) is not grpc.aio.EOF:
            if not request.HasField("plan"):
                continue
            result = self._step(request.plan)
            if self._step_s:
                done_at = max(time.monotonic(), done_at + self._step_s)
                await asyncio.sleep(done_at - time.monotonic())
            await context.write(pb.ExecuteResponse(result=result))

    async def GetStatus(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.GetStatusResponse:
        """Says that it serves."""
        return pb.GetStatusResponse(phase=pb.WORKER_PHASE_SERVING, incarnation=self._incarnation)

    def _hello(self, epoch: int) -> pb.WorkerHello:
        return pb.WorkerHello(
            protocol_version=1,
            scheduler_epoch=epoch,
            incarnation=self._incarnation,
            model=pb.ModelInfo(
                name="instant",
                fingerprint="instant",
                max_model_len=MAX_MODEL_LEN,
                vocab_size=self._vocab_size,
                tokenizer=self._files,
                dtype="float32",
                kv_bytes_per_token=1,
            ),
            block_size=BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
            num_slots=_NUM_SLOTS,
            max_batched_tokens=_MAX_BATCHED_TOKENS,
            max_in_flight=_MAX_IN_FLIGHT,
        )

    def _step(self, plan: pb.StepPlan) -> pb.StepResult:
        for admitted in plan.admitted:
            self._uncomputed[admitted.slot] = len(admitted.token_ids) // 4 - admitted.num_computed_tokens
        slots = np.frombuffer(plan.slots, "<i4")
        left = self._uncomputed[slots] - np.frombuffer(plan.num_tokens, "<i4")
        sampled = slots[left == 0]
        self._uncomputed[slots] = np.maximum(left, 1)  # the token that is sampled has no KV yet
        tokens = self._random.integers(0, self._vocab_size, len(sampled), np.int32)
        now_ns = time.monotonic_ns()
        timings = pb.StepTimings(
            received_ns=now_ns, started_ns=now_ns, forward_ns=now_ns, sampling_ns=now_ns, finished_ns=now_ns
        )
        return pb.StepResult(
            seq=plan.seq, slots=sampled.tobytes(), token_ids=tokens.tobytes(), timings=timings
        )


async def _serve(step_s: float) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    pb_grpc.add_WorkerServiceServicer_to_server(InstantWorker(make_tokenizer(), step_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve random tokens to one scheduler.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that a step takes (default: 0)")
    uvloop.run(_serve(parser.parse_args().step_ms / 1000))
