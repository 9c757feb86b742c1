"""An InferenceService over real gRPC with a fake engine behind it, and what its callers get."""

import asyncio
import contextlib

import grpc
import pytest
from fake_engine import FakeConfig
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_service.frontend import Frontend
from scheduler_service.inference_api import InferenceApi


@contextlib.asynccontextmanager
async def serving(engine):
    """A channel to the service."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    InferenceApi(Frontend(engine, FakeConfig())).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fake engine has no event for it
            await asyncio.sleep(0.002)


async def submitted(engine, call):
    """Waits until the request has reached the engine."""
    await call.initial_metadata()
    return engine.spec


async def failure(call):
    """Code, details by type name, and the error itself."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    error = caught.value
    status = rpc_status.from_call(_SyncView(error))
    details = {}
    for packed in status.details:
        name = packed.type_url.rsplit(".", 1)[-1]
        details[name] = detail = getattr(error_details_pb2, name)()
        packed.Unpack(detail)
    return error, details


class _SyncView:
    """An aio error as rpc_status.from_call wants it."""

    def __init__(self, error):
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())
        self.code = error.code
        self.details = error.details
