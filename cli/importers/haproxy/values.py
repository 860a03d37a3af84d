"""Values in an HAProxy configuration: times, numbers and addresses. No I/O.

Source: sections 2.5 "Time format" and 2.9 "Address formats" of HAProxy's configuration manual.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from controlplane import address as addresses

_TIME = re.compile(r"([0-9]{1,15})(us|ms|s|m|h|d)?")
_UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_INTEGER = re.compile(r"[0-9]{1,15}")
_TCP_PREFIXES = (
    "ipv4@",
    "ipv6@",
    "ip@",
    "tcp@",
    "tcp4@",
    "tcp6@",
    "stream+ip@",
    "stream+ipv4@",
    "stream+ipv6@",
)
_PORT = re.compile(r"([+-]?)([0-9]{1,5})(?:-([0-9]{1,5}))?")


class ValueProblem(ValueError):
    """A value is not valid; the message is the problem, and `remedy` says what to write."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(problem)


def parse_time(text: str) -> float:
    """Return a time in seconds. Without a unit it is in milliseconds."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueProblem(f"{text!r} is not a time", "write a whole number with a unit, such as 30s")
    return round(int(match[1]) * _UNIT_SECONDS[match[2] or "ms"], 6)


def parse_integer(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueProblem(f"{text!r} is not a whole number", "write a whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, and a port, a range of ports, or an offset to the port that the client connects to.

    `host` is empty for all addresses. `port` is None if there is none.
    """

    host: str
    port: int | None
    last_port: int | None = None
    is_offset: bool = False

    def listen(self) -> str:
        """Return the address with its first port, as Tidevoy's settings write a listening address."""
        return addresses.join(self.host or "0.0.0.0", self.port or 0)  # noqa: S104 - not bound


def parse_address(text: str) -> TcpAddress | None:
    """Return an address of TCP; None for another family, such as a Unix socket."""
    for prefix in _TCP_PREFIXES:
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            break
    else:
        if text.startswith("/") or "@" in text:
            return None
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not _is_ipv6(host)):
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]")
    host = "" if host == "*" else host
    if not port:
        return TcpAddress(host, None)
    match = _PORT.fullmatch(port)
    if match is None:
        raise ValueProblem(f"{port!r} in {text!r} is not a port", "write a port from 1 to 65535")
    first = int(f"{match[1]}{match[2]}")
    return TcpAddress(host, first, int(match[3]) if match[3] else None, is_offset=bool(match[1]))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
