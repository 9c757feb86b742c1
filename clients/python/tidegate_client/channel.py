"""How a channel to the scheduler is opened: address, limits, keepalive, credentials.

Owns those options for sync and async alike.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import grpc

from tidegate_client.errors import InvalidRequestError

DEFAULT_ADDRESS = "localhost:50051"
ADDRESS_VARIABLE = "TIDEGATE_ADDRESS"

_SCHEMES = ("unix:", "unix-abstract:", "vsock:", "ipv4:", "ipv6:", "xds:")  # of gRPC's own names

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A scheduler that is back is found within two seconds; by default it may take two minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # RetryPolicy decides about retries; gRPC's transparent ones would come on top.
    ("grpc.enable_retries", 0),
]


def resolve_address(address: str | None) -> str:
    """Returns the address to use: the given one, TIDEGATE_ADDRESS, or localhost:50051."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def are_several(address: str) -> bool:
    """Whether an address is that of several schedulers, which take turns."""
    return "," in address or address.startswith("dns:")


def open_channel(address: str | None, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Opens a channel; without credentials it is not encrypted. Connects when it is first used.

    Raises InvalidRequestError for an address that is none.
    """
    target, options = _target(resolve_address(address), encrypted=credentials is not None)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def open_async_channel(address: str | None, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Opens a channel for asyncio; without credentials it is not encrypted. Raises as open_channel."""
    target, options = _target(resolve_address(address), encrypted=credentials is not None)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _target(address: str, *, encrypted: bool) -> tuple[str, list[tuple[str, Any]]]:
    """Returns gRPC's name for an address, and the channel's options."""
    if not are_several(address):
        _check_endpoint(address)
        return address, OPTIONS
    options = [*OPTIONS, ("grpc.lb_policy_name", "round_robin")]
    if "," not in address or address.startswith(("ipv4:", "ipv6:")):
        return address, options
    if encrypted:
        # A certificate is checked against one name.
        raise _refused(f"several addresses ({address}) and TLS need one name for all: dns:///NAME:PORT")
    return "ipv4:" + ",".join(map(_numeric, address.split(","))), options


def _check_endpoint(address: str) -> None:
    """gRPC would take port 443 where none is named, and a URL for a host's name."""
    host, _, port = address.rpartition(":")
    if address.startswith(_SCHEMES) or (host and "/" not in host and port.isdigit()):
        return
    raise _refused(f"{address!r} is not host:port, such as {DEFAULT_ADDRESS}")


def _numeric(endpoint: str) -> str:
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or not port.isdigit():
        raise _refused(f"{endpoint!r} is not host:port, such as {DEFAULT_ADDRESS}")
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise _refused(
            f"{endpoint!r} has no IPv4 address: {error}; list IPv6 ones as ipv6:[A]:P,[B]:P"
        ) from None
    return f"{found[0][4][0]}:{port}"


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError("INVALID_ARGUMENT", message)
