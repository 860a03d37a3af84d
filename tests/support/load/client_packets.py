"""Packets of the MySQL client/server protocol that load clients send."""

from __future__ import annotations

import struct

from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.support.module.envoy import login_packet
from tests.support.tidb_sim_clients import CAPABILITIES

_WITH_TLS = CAPABILITIES | Capability.SSL

SSL_REQUEST = frame(1, struct.pack("<IIB23x", _WITH_TLS, 1 << 24, 45))
"""Requests TLS. The client sends its ClientHello next."""
QUIT = frame(0, bytes((MySqlCommand.QUIT,)))


def login(user: str, *, tls: bool = False) -> bytes:
    """Build a login with the empty password; with `tls`, for use after an SSLRequest."""
    return login_packet(_WITH_TLS, user, 2) if tls else login_packet(CAPABILITIES, user)


def query(text: str) -> bytes:
    """Build a COM_QUERY."""
    return frame(0, bytes((MySqlCommand.QUERY,)) + text.encode())
