"""How a channel to the scheduler is opened: address, limits, keepalive, credentials.

Owns those options for sync and async alike.
"""

from __future__ import annotations

import os

import grpc

DEFAULT_ADDRESS = "localhost:50051"
ADDRESS_VARIABLE = "TIDEGATE_ADDRESS"

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024

OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # RetryPolicy decides about retries; gRPC's transparent ones would come on top.
    ("grpc.enable_retries", 0),
]


def resolve_address(address: str | None) -> str:
    """Returns the address to use: the given one, TIDEGATE_ADDRESS, or localhost:50051."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def open_channel(address: str | None, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Opens a channel; without credentials it is not encrypted. Connects when it is first used."""
    target = resolve_address(address)
    if credentials is None:
        return grpc.insecure_channel(target, options=OPTIONS)
    return grpc.secure_channel(target, credentials, options=OPTIONS)


def open_async_channel(address: str | None, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Opens a channel for asyncio; without credentials it is not encrypted."""
    target = resolve_address(address)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)
