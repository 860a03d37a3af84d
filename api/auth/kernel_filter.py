"""A filter in the kernel before the listening socket: it drops packets of addresses that are shut out.

A program of classic BPF (https://docs.kernel.org/networking/filter.html), which any user may attach to a
socket of his own. It judges packets to the listener, which are those that open connections; a connection
that was open before keeps the filter that it began with. Where the kernel will not have it, the acceptor
closes such connections itself, and that costs some microseconds each.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets count from the IP header
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20  # BPF_LD | BPF_ABS | BPF_B, ... | BPF_W
_EQUAL, _JUMP, _SHIFT_RIGHT, _RETURN = 0x15, 0x05, 0x74, 0x06
_ACCEPT_PACKET, _DROP_PACKET = 0xFFFFFFFF, 0  # bytes of the packet that are let through
_SOURCE_V4, _SOURCE_V6 = 12, 8  # offsets of the source address in the IP header

Instruction = tuple[int, int, int, int]  # operation, steps if true, steps if false, operand


def build_filter(sources: Iterable[str]) -> list[Instruction]:
    """The filter that drops these: IPv4 addresses and IPv6 networks of 64 bits. All others pass."""
    v4: list[Instruction] = []
    v6: list[Instruction] = []
    for source in sources:
        network = ipaddress.ip_network(source)
        raw = network.network_address.packed
        if network.version == 4:
            v4 += [(_EQUAL, 0, 1, int.from_bytes(raw)), (_RETURN, 0, 0, _DROP_PACKET)]
        else:
            high, low = struct.unpack_from("!II", raw)
            v6 += [
                (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_V6),
                (_EQUAL, 0, 3, high),
                (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_V6 + 4),
                (_EQUAL, 0, 1, low),
                (_RETURN, 0, 0, _DROP_PACKET),
            ]
    v4 = [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_V4), *v4, (_RETURN, 0, 0, _ACCEPT_PACKET)]
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_EQUAL, 0, 1, 6),  # the version of IP
        (_JUMP, 0, 0, len(v4)),
        *v4,
        *v6,
        (_RETURN, 0, 0, _ACCEPT_PACKET),
    ]


def drop_sources(listener: socket.socket, sources: list[str]) -> bool:
    """Let the kernel drop what comes from these, and only these. False: it will not, and drops nothing."""
    if not sources:
        _detach_filter(listener)
        return True
    try:
        code = b"".join(struct.pack("HBBI", *instruction) for instruction in build_filter(sources))
        buffer = ctypes.create_string_buffer(code, len(code))
        attached = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
    except OSError:
        _detach_filter(listener)  # the filter before this one may hold addresses that are forgiven by now
        return False
    return True


def _detach_filter(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # there is none to detach
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
