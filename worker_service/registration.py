"""Tells a scheduler of this worker, again and again, so that one that restarts finds it."""

from __future__ import annotations

import asyncio
import logging

import grpc

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from worker_service.logs import log_event

_LOGGER = logging.getLogger(__name__)
_INTERVAL_S = 3.0
_TIMEOUT_S = 5.0


async def keep_registered(scheduler: str, address: str) -> None:
    """Registers `address` every few seconds until cancelled; then deregisters if the scheduler answers."""
    worker_id: str | None = None
    known: bool | None = None
    async with grpc.aio.insecure_channel(scheduler) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            while True:
                try:
                    request = admin_pb2.RegisterWorkerRequest(address=address)
                    worker_id = (await admin.RegisterWorker(request, timeout=_TIMEOUT_S)).worker_id
                    why = ""
                except grpc.aio.AioRpcError as error:
                    why = error.code().name
                if known is not (known := not why):
                    event = "registered" if known else "the scheduler can't be reached, trying on"
                    level = logging.INFO if known else logging.WARNING
                    log_event(_LOGGER, level, event, scheduler=scheduler, why=why)
                await asyncio.sleep(_INTERVAL_S)
        finally:
            if worker_id is not None and known:
                await _deregister(admin, worker_id)


async def _deregister(admin: admin_pb2_grpc.AdminServiceStub, worker_id: str) -> None:
    try:
        await admin.DeregisterWorker(
            admin_pb2.DeregisterWorkerRequest(worker_id=worker_id), timeout=_TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        log_event(_LOGGER, logging.WARNING, "could not deregister", why=error.code().name)
