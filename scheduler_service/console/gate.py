"""Owns who may see the console: the rules of the admin API, in the words of browsers."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from http import HTTPStatus

from scheduler_service.auth import Door
from scheduler_service.console.http import Request, Response, refusal
from scheduler_service.errors import ServiceError

_CHALLENGE = 'Basic realm="Tidegate console", charset="UTF-8"'


class Gate:
    """Asks for credentials where the admin API does, and refuses pages of other hosts."""

    def __init__(self, service: str, door: Door | None, host: str, *, secure: bool) -> None:
        """`service`: whose rules apply, by its full name. `door`: None where nobody is asked."""
        self._service = service
        self._door = door
        self._host = host.strip("[]").lower()
        self._secure = secure

    def refuse(self, request: Request) -> Response | None:
        """Why not; None for those who may come in."""
        site = request.headers.get("sec-fetch-site", "none")
        if request.path != "/" and site not in ("none", "same-origin"):  # links may lead to the page
            return refusal(HTTPStatus.FORBIDDEN, "Other pages may not look in here.")
        # With TLS the browser has checked the name.
        if not self._secure and not self._is_ours(request.headers.get("host", "")):
            return refusal(
                HTTPStatus.FORBIDDEN,
                "This name is not one of this console's. Use localhost, an address, or the name that "
                "--console-host says.",
            )
        if self._door is None:
            return None
        try:
            self._door.admit(self._service, _authorization(request.headers.get("authorization")))
        except ServiceError as error:
            return refusal(HTTPStatus.UNAUTHORIZED, error.message, WWW_Authenticate=_CHALLENGE)
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether no foreign name led here: a page that has its own name resolve to this address can't read
        what is refused for that name. An address is no name."""
        name = host.lower()
        is_ipv6 = name.startswith("[")
        name = name[1:].partition("]")[0] if is_ipv6 else name.partition(":")[0]
        if name in ("localhost", self._host):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _authorization(header: str | None) -> list[str]:
    """What a door wants to see: browsers send tokens as the password of any user."""
    if header is None:
        return []
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return [header]
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ["Basic"]
    return [f"Bearer {decoded.partition(':')[2]}"]
