"""Parse and format `host:port` addresses; an IPv6 host is in brackets."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

# Maximum number of cached results. Each planner run parses the addresses of all nodes again.
_ADDRESS_CACHE_SIZE = 32_768

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?"
)


@lru_cache(_ADDRESS_CACHE_SIZE)
def split(address: str) -> tuple[str, int]:
    """Return host (without brackets) and port of `host:port`. Raises ValueError if the address is invalid."""
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ValueError(f"{address!r} has no port; write it as host:port")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"the port of {address!r} is not a number from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise ValueError(f"{host} in {address!r} is not an IPv6 address") from None
    if ":" in host:
        raise ValueError(f"{address!r} is ambiguous; write an IPv6 host in brackets, as [fd00::1]:4000")
    if not host or (literal_ip(host) is None and not _HOST_NAME.fullmatch(host)):
        raise ValueError(f"{host!r} in {address!r} is neither an IP address nor a host name")
    return host, int(port)


def join(host: str, port: int) -> str:
    """Return `host:port` for a host (without brackets) and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(_ADDRESS_CACHE_SIZE)
def literal_ip(host: str) -> str | None:
    """Return the canonical text of a literal IP address, or None if the host is a DNS name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether `host:port` can be reached only from this machine; the port may be 0.

    True for loopback addresses, also for IPv4 ones mapped into IPv6, and for `localhost` (RFC 6761, section
    6.3). False for other names and for invalid addresses.
    """
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
