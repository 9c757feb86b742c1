"""Translates between gRPC's WorkerService and the worker. Decides only what the protocol says of streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc

from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc
from worker_service.logs import log_event
from worker_service.plan_stream_api import PlanStream, StreamEnd
from worker_service.telemetry import Telemetry
from worker_service.worker import Engine, Phase, Worker

_LOGGER = logging.getLogger(__name__)
PROTOCOL_VERSION = 1
_HELLO_TIMEOUT_S = 10.0

_PHASES = {
    Phase.LOADING: pb.WORKER_PHASE_LOADING,
    Phase.WARMING_UP: pb.WORKER_PHASE_WARMING_UP,
    Phase.READY: pb.WORKER_PHASE_READY,
    Phase.DRAINING: pb.WORKER_PHASE_DRAINING,
}

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerApi(worker_pb2_grpc.WorkerServiceServicer):
    """The worker's gRPC face. One stream at a time executes; one with a newer epoch takes over."""

    def __init__(self, worker: Worker, telemetry: Telemetry | None = None) -> None:
        self._worker = worker
        self._telemetry = telemetry or Telemetry()
        self._highest_epoch = 0
        self._current: PlanStream | None = None

    async def Execute(self, _requests: Any, context: Context) -> None:
        """Runs a step stream to its end. See worker.proto for the errors."""
        try:
            hello = await self._read_hello(context)
            engine = self._check_hello(hello)
            self._highest_epoch = hello.scheduler_epoch
            limits, in_flight = engine.limits, self._worker.config.max_in_flight
            telemetry = self._telemetry.stream(hello.worker_id, limits.num_slots)
            stream = PlanStream(context, engine.steps, limits, in_flight, telemetry)
            previous, self._current = self._current, stream
            if previous is not None:
                taken_over = f"a scheduler with the newer epoch {hello.scheduler_epoch} took over"
                previous.end_now(StreamEnd(grpc.StatusCode.FAILED_PRECONDITION, taken_over))
            log_event(_LOGGER, logging.INFO, "stream opened", epoch=hello.scheduler_epoch)
            try:
                await stream.run(self._hello(hello, engine))
            finally:
                if self._current is stream:
                    self._current = None
            log_event(_LOGGER, logging.INFO, "stream closed", epoch=hello.scheduler_epoch)
        except StreamEnd as end:
            log_event(_LOGGER, logging.WARNING, "stream ended", code=end.code.name, why=end.message)
            await context.abort(end.code, end.message)

    async def GetStatus(self, _request: pb.GetStatusRequest, _context: Context) -> pb.GetStatusResponse:
        """What the worker is doing, also while it loads."""
        worker, engine = self._worker, self._worker.engine
        phase = _PHASES[worker.phase]
        if self._current is not None and worker.phase is Phase.READY:
            phase = pb.WORKER_PHASE_SERVING
        response = pb.GetStatusResponse(
            phase=phase,
            progress=worker.progress,
            detail=worker.detail,
            incarnation=worker.incarnation,
            block_size=worker.config.block_size,
        )
        if engine is not None:
            response.model.CopyFrom(_model_info(engine, with_tokenizer=False))
            response.num_blocks = engine.limits.num_blocks
            response.steps = engine.steps.executor.steps
        return response

    async def drain(self) -> None:
        """Finishes the steps in flight of the current stream, and ends it."""
        if self._current is not None:
            await self._current.drain(StreamEnd(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down"))

    def stop_draining(self, timeout_s: float) -> None:
        """Ends the current stream with results missing, since the time for draining is over."""
        left = 0
        if self._current is not None:
            left = self._current.num_unanswered
            why = (
                f"the worker is shutting down, and its drain_timeout_s = {timeout_s:g} ran out with "
                f"{left} plans unanswered; a higher --drain-timeout-s lets them finish"
            )
            self._current.end_now(StreamEnd(grpc.StatusCode.UNAVAILABLE, why))
        remedy = "raise --drain-timeout-s if steps take longer than that"
        fields = {"timeout_s": timeout_s, "plans_left": left, "remedy": remedy}
        log_event(_LOGGER, logging.WARNING, "drain timed out", **fields)

    async def _read_hello(self, context: Context) -> pb.SchedulerHello:
        request = None
        with contextlib.suppress(TimeoutError):
            request = await asyncio.wait_for(context.read(), _HELLO_TIMEOUT_S)
        if not isinstance(request, pb.ExecuteRequest) or request.WhichOneof("message") != "hello":
            raise StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        return request.hello

    def _check_hello(self, hello: pb.SchedulerHello) -> Engine:
        worker, engine = self._worker, self._worker.engine
        if worker.phase is not Phase.READY or engine is None:
            raise StreamEnd(
                grpc.StatusCode.UNAVAILABLE, f"the worker is {worker.phase.value}: {worker.detail}"
            )
        refuse = grpc.StatusCode.FAILED_PRECONDITION
        if hello.protocol_version != PROTOCOL_VERSION:
            why = f"protocol version {hello.protocol_version}; this worker speaks {PROTOCOL_VERSION}"
            raise StreamEnd(refuse, why)
        if hello.model_fingerprint not in ("", engine.model.fingerprint):
            why = f"model {hello.model_fingerprint} is wanted; this worker has {engine.model.fingerprint}"
            raise StreamEnd(refuse, why)
        if hello.scheduler_epoch <= self._highest_epoch:
            why = f"epoch {hello.scheduler_epoch} is stale; {self._highest_epoch} was seen"
            raise StreamEnd(refuse, why)
        return engine

    def _hello(self, hello: pb.SchedulerHello, engine: Engine) -> pb.WorkerHello:
        return pb.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            scheduler_epoch=hello.scheduler_epoch,
            incarnation=self._worker.incarnation,
            model=_model_info(engine, with_tokenizer=True),
            block_size=engine.limits.block_size,
            num_blocks=engine.limits.num_blocks,
            num_slots=engine.limits.num_slots,
            max_batched_tokens=engine.limits.max_batched_tokens,
            max_in_flight=self._worker.config.max_in_flight,
            num_host_blocks=engine.limits.num_host_blocks,
            block_copy_ns=engine.block_copy_ns,
        )


def _model_info(engine: Engine, with_tokenizer: bool) -> pb.ModelInfo:
    model = engine.model
    info = pb.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=engine.limits.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        structured_output=engine.steps.executor.grammars.vocabulary is not None,
    )
    if with_tokenizer:
        files = model.tokenizer
        info.tokenizer.tokenizer_json = files.tokenizer_json
        info.tokenizer.chat_template = files.chat_template
        info.tokenizer.special_tokens.update(files.special_tokens)
    return info
