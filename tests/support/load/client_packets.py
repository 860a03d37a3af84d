"""What clients of a load send, as whole packets. Layouts: MySQL client/server protocol, connection phase."""

from __future__ import annotations

import struct

from sandbox.tidb_sim.packets import Capability, Command, frame
from tests.support.module.envoy import response
from tests.support.tidb_sim_clients import CAPABILITIES

_WITH_TLS = CAPABILITIES | Capability.SSL

SSL_REQUEST = frame(1, struct.pack("<IIB23x", _WITH_TLS, 1 << 24, 45))
"""Asks for TLS; the ClientHello follows."""
QUIT = frame(0, bytes((Command.QUIT,)))


def login(user: str, *, tls: bool = False) -> bytes:
    """A login with the empty password; with `tls`, as it follows an SSLRequest."""
    return response(_WITH_TLS, user, 2) if tls else response(CAPABILITIES, user)


def query(text: str) -> bytes:
    """A COM_QUERY."""
    return frame(0, bytes((Command.QUERY,)) + text.encode())
