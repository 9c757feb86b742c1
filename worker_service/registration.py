"""Tells a scheduler of this worker, again and again, so that one that restarts finds it."""

from __future__ import annotations

import asyncio
import logging

import grpc

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from worker_service.logs import log_event
from worker_service.tls_api import Dialler

_LOGGER = logging.getLogger(__name__)
_INTERVAL_S = 3.0
_TIMEOUT_S = 5.0


async def look_for(scheduler: str, dialler: Dialler) -> None:
    """Says so, while the model loads, if nothing answers at the scheduler's address."""
    async with dialler.open(scheduler) as channel:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            why = f"nothing answers within {_TIMEOUT_S:g} s: is it the address of the scheduler's admin API?"
            log_event(_LOGGER, logging.WARNING, "no scheduler found yet", scheduler=scheduler, why=why)


async def keep_registered(scheduler: str, address: str, dialler: Dialler) -> None:
    """Registers `address` every few seconds until cancelled; then deregisters if the scheduler answers."""
    known: bool | None = None
    while True:
        # A channel lasts until it fails: the next one uses the certificates that there are by then.
        async with dialler.open(scheduler) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            worker_id: str | None = None
            try:
                while True:
                    request = admin_pb2.RegisterWorkerRequest(address=address)
                    metadata = dialler.metadata()
                    answer = await admin.RegisterWorker(request, timeout=_TIMEOUT_S, metadata=metadata)
                    worker_id = answer.worker_id
                    if not known:
                        log_event(_LOGGER, logging.INFO, "registered", scheduler=scheduler)
                    known = True
                    await asyncio.sleep(_INTERVAL_S)
            except grpc.aio.AioRpcError as error:
                if known is not False:
                    why = f"{error.code().name}: {error.details()}"
                    log_event(
                        _LOGGER, logging.WARNING, "not registered, trying on", scheduler=scheduler, why=why
                    )
                known = False
            except asyncio.CancelledError:
                if worker_id is not None:
                    await _deregister(admin, worker_id, dialler)
                raise
        await asyncio.sleep(_INTERVAL_S)


async def _deregister(admin: admin_pb2_grpc.AdminServiceStub, worker_id: str, dialler: Dialler) -> None:
    request = admin_pb2.DeregisterWorkerRequest(worker_id=worker_id)
    try:
        await admin.DeregisterWorker(request, timeout=_TIMEOUT_S, metadata=dialler.metadata())
    except grpc.aio.AioRpcError as error:
        log_event(_LOGGER, logging.WARNING, "could not deregister", why=error.code().name)
