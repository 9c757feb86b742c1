"""Owns the look whether this process's ports are free, before it opens what another one may have open.

Whoever listens in the end still has to fail where a port was taken meanwhile.
"""

from __future__ import annotations

import errno
import os
import socket

from scheduler_service.config import ServiceConfig


def check_ports(config: ServiceConfig) -> None:
    """Raises OSError, with the option to change, for a port that cannot be bound.

    The port that frontends share is left out: they wait for those of a killed scheduler to leave it.
    """
    if not config.frontends:
        _check("cannot listen on", config.host, config.port, "--port")
    if config.admin_port is not None:
        _check("cannot listen on", config.admin_host or config.host, config.admin_port, "--admin-port")
    if config.console_port is not None:
        _check("no console on", config.console_host, config.console_port, "--console-port")


def _check(what: str, host: str, port: int, option: str) -> None:
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        host_option = option.replace("port", "host")
        raise OSError(f"{what} {address}: {error.strerror}; choose another {host_option}") from None
    errors = [_bind_error(family, where) for family, _, _, _, where in found]
    if None not in errors:  # one address of a name is enough, as for gRPC
        number = errors[0] or 0
        option = option if number in (errno.EADDRINUSE, errno.EACCES) else option.replace("port", "host")
        raise OSError(f"{what} {address}: {os.strerror(number)}; choose another {option}")


def _bind_error(family: int, where: tuple[object, ...]) -> int | None:
    """The error number of binding there; None: it works."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            return error.errno or errno.EIO
    return None
