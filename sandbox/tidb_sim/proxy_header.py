"""The PROXY protocol header, version 2, that a proxy sends in front of a connection's first bytes.

Format: haproxy/haproxy doc/proxy-protocol.txt. TiDB reads the header at its first read after the greeting.
"""

from __future__ import annotations

import ipaddress

from controlplane.address import join
from sandbox.tidb_sim.greeting import LoginRefused
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream

_MAGIC = b"\r\n\r\n\0\r\nQUIT\n"


async def read_client_address(stream: PacketStream) -> str | None:
    """Return the client's `host:port` from the header, or None if there is no address in it.

    Raises LoginRefused if the header is missing, and ConnectionClosed if it is invalid.
    """
    if await stream.peek(4) != _MAGIC[:4]:
        raise LoginRefused(1105, "PROXY protocol header is required", "HY000")
    head = await stream.peek(16)
    if head[:12] != _MAGIC or head[12] >> 4 != 2:
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
