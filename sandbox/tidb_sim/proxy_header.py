"""The PROXY protocol header that a proxy may send in front of a connection's first bytes.

Format: haproxy/haproxy doc/proxy-protocol.txt. TiDB reads the header at its first read after the greeting. By
default, it also accepts connections without a header (pingcap/tidb pkg/config/config.go, `fallbackable`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.address import join
from sandbox.tidb_sim.greeting import LoginRefused
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream

_V2_MAGIC = b"\r\n\r\n\0\r\nQUIT\n"
_V1_MAGIC = b"PROXY "
_V1_MAX_BYTES = 107


@dataclass(frozen=True)
class ProxyProtocol:
    """Which peers may send a header. `networks`: CIDRs, or `*` for all peers; if empty, no peer may."""

    networks: Sequence[str] = ()
    fallbackable: bool = True

    def trusts(self, peer: str) -> bool:
        """Return whether a header from this IP address may be read."""
        if "*" in self.networks:
            return True
        if not self.networks or not peer:
            return False
        address = ipaddress.ip_address(peer)
        return any(address in ipaddress.ip_network(network, strict=False) for network in self.networks)

    async def read_client_address(self, stream: PacketStream) -> str | None:
        """Return the client's `host:port` from the header, or None if there is no header or no address in it.

        Raises LoginRefused if a required header is missing, and ConnectionClosed if the header is invalid.
        """
        start = await stream.peek(4)
        if start == _V2_MAGIC[:4]:
            return await _read_v2(stream)
        if start == _V1_MAGIC[:4]:
            return await _read_v1(stream)
        if not self.fallbackable:
            raise LoginRefused(1105, "PROXY protocol header is required", "HY000")
        return None


async def _read_v2(stream: PacketStream) -> str | None:
    head = await stream.peek(16)
    if head[:12] != _V2_MAGIC or head[12] >> 4 != 2:
        raise ConnectionClosed
    size = 16 + int.from_bytes(head[14:16], "big")
    header = await stream.peek(size)
    stream.discard(size)
    command, family = header[12] & 0x0F, header[13] >> 4
    width = {1: 4, 2: 16}.get(family)
    if command == 0 or width is None or len(header) < 16 + 2 * width + 4:
        return None
    source = ipaddress.ip_address(header[16 : 16 + width])
    return join(str(source), int.from_bytes(header[16 + 2 * width : 18 + 2 * width], "big"))


async def _read_v1(stream: PacketStream) -> str | None:
    line = b""
    while not line.endswith(b"\r\n"):
        if len(line) == _V1_MAX_BYTES:
            raise ConnectionClosed
        line = await stream.peek(len(line) + 1)
    stream.discard(len(line))
    words = line.decode(errors="replace").split()
    if len(words) != 6 or words[0] != "PROXY":
        return None
    try:
        return join(str(ipaddress.ip_address(words[2])), int(words[4]))
    except ValueError:
        raise ConnectionClosed from None
