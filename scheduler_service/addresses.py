"""Owns what a host:port address may look like."""

from __future__ import annotations

import ipaddress

_MAX_PORT = 65_535


def check_address(address: str) -> None:
    """Raises ValueError, with what is wrong, unless `address` is host:port or [IPv6 host]:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(f"address {address!r} is not host:port, such as 127.0.0.1:50061")
    if any(character.isspace() or character in "/@,#?" for character in address):
        raise ValueError(f"address {address!r} has a character that host:port cannot have")
    if any(character in host for character in ":[]") and not _is_bracketed_ipv6(host):
        raise ValueError(f"address {address!r}: an IPv6 host needs brackets, such as [::1]:50061")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= _MAX_PORT:
        raise ValueError(f"address {address!r}: the port is {port!r}; allowed is 1 to {_MAX_PORT}")


def _is_bracketed_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return host.startswith("[") and host.endswith("]")


def host_of(address: str) -> str:
    """The host in host:port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
