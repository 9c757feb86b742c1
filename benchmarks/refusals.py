"""Measures how long a burst of requests waits for its refusals, beside the least that gRPC in Python takes.

Owns the arithmetic. Bursts of all sizes reach a scheduler whose queue has a limit, and in turn a bare gRPC
server that ends each call at once with the same status, and does nothing else. Times are those of callers:
from a call's start to its status, so they hold the callers' own work too, which shares this machine's cores.
Accepted requests are read to their ends.

    python benchmarks/refusals.py [--bursts 64,1000,10000] [--rounds 3]
    python benchmarks/refusals.py --queue 0 --bursts 64    # all are refused
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import uvloop
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from benchmarks.processes import cpu_time_s, first_line, instant_worker, python_process, scheduler_process
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

_CHANNELS = 8
# As the scheduler's: by default gRPC drops calls by itself when thousands come at once.
_PATIENT = [
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 20_480),
    ("grpc.server_max_unrequested_time_in_server", 300),
]


@dataclass(frozen=True, slots=True)
class Burst:
    """What came of one."""

    refused_ms: list[float]
    accepted: int
    server_us: float
    """Processor time of the server for each call."""
    caller_us: float


async def serve_bare() -> None:
    """Refuses every call of any method, and prints its port."""
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1))
    told = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full")
    told.details.add().Pack(retry)
    status = rpc_status.to_status(told)

    async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status.code, status.details, status.trailing_metadata)

    class Everything(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            behaviour: Any = refuse  # the stubs describe those of threaded servers
            return grpc.unary_stream_rpc_method_handler(behaviour)

    server = grpc.aio.server(handlers=[Everything()], options=_PATIENT)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextlib.contextmanager
def _bare() -> Iterator[tuple[int, int]]:
    """Port and process id."""
    with python_process("benchmarks/refusals.py", "--bare") as server:
        yield int(first_line(server)), server.pid


@contextlib.contextmanager
def _scheduler(step_ms: float, queue: int) -> Iterator[tuple[int, int]]:
    """Port and process id of one that has a worker."""
    flags = ["--max-num-queued-reqs", str(queue), "--max-num-seqs", "64", "--journal-off"]
    with (
        instant_worker(step_ms) as worker,
        scheduler_process(worker, *flags, "--log-level", "error") as scheduler,
    ):
        yield scheduler.port, scheduler.pid


async def burst(port: int, pid: int, num: int) -> Burst:
    """Sends so many requests at once, and waits for all."""
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(_CHANNELS)
    ]
    stubs = [pb_grpc.InferenceServiceStub(channel) for channel in channels]
    refused_ms: list[float] = []

    async def accepted(number: int) -> bool:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=pb.StoppingParams(max_tokens=8, ignore_eos=True)
        )
        began = time.perf_counter()
        try:
            async for _ in stubs[number % _CHANNELS].Generate(request):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or not _says_when(error):
                raise
            refused_ms.append(1e3 * (time.perf_counter() - began))
            return False
        return True

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    server_s, caller_s = cpu_time_s(pid), time.process_time()
    taken = sum(await asyncio.gather(*(accepted(number) for number in range(num))))
    server_s, caller_s = cpu_time_s(pid) - server_s, time.process_time() - caller_s
    await asyncio.gather(*(channel.close() for channel in channels))
    return Burst(refused_ms, taken, 1e6 * server_s / num, 1e6 * caller_s / num)


def _says_when(error: grpc.aio.AioRpcError) -> bool:
    """Whether a refusal says when to come again."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            details = status_pb2.Status.FromString(value).details
            return any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in details)
    return False


async def _measure(sizes: list[int], rounds: int, step_ms: float, queue: int) -> None:
    head = ("server", "burst", "accepted", "refused", "median ms", "p99 ms", "server us", "caller us")
    print(("{:>10} " * len(head)).format(*head))
    with _bare() as bare, _scheduler(step_ms, queue) as scheduler:
        for num in sizes:
            for name, (port, pid) in {"bare": bare, "scheduler": scheduler}.items():
                bursts = [await burst(port, pid, num) for _ in range(rounds)]
                waited = [ms for each in bursts for ms in each.refused_ms]
                print(
                    f"{name:>10} {num:>10} {sum(b.accepted for b in bursts):>10} {len(waited):>10} "
                    f"{np.median(waited) if waited else 0:>10.1f} "
                    f"{np.percentile(waited, 99) if waited else 0:>10.1f} "
                    f"{statistics.median(b.server_us for b in bursts):>10.0f} "
                    f"{statistics.median(b.caller_us for b in bursts):>10.0f}"
                )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bursts", default="64,1000,10000", help="requests at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queue", type=int, default=512, help="requests that may wait (default: 512)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="time that a step takes (default: 50)")
    options = parser.parse_args()
    if options.bare:
        uvloop.run(serve_bare())
    else:
        sizes = [int(size) for size in options.bursts.split(",")]
        uvloop.run(_measure(sizes, options.rounds, options.step_ms, options.queue))


if __name__ == "__main__":
    main()
