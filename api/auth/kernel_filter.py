"""A kernel filter on the listening socket that drops packets from banned addresses.

It is a classic BPF program (https://docs.kernel.org/networking/filter.html), which an unprivileged user may
attach to a socket of its own. It filters packets to the listener, which are those that open connections; an
established connection keeps the filter it was accepted with. If the kernel rejects the filter, the acceptor
closes such connections itself, which costs some microseconds each.
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
_ACCEPT_PACKET, _DROP_PACKET = 0xFFFFFFFF, 0  # number of bytes of the packet to accept
_SOURCE_V4, _SOURCE_V6 = 12, 8  # offsets of the source address in the IP header

Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, operand


def build_filter(sources: Iterable[str]) -> list[Instruction]:
    """Return a filter that drops these IPv4 addresses and IPv6 /64 networks, and accepts all others."""
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
        (_EQUAL, 0, 1, 6),  # IP version
        (_JUMP, 0, 0, len(v4)),
        *v4,
        *v6,
        (_RETURN, 0, 0, _ACCEPT_PACKET),
    ]


def drop_sources(listener: socket.socket, sources: list[str]) -> bool:
    """Drop packets from exactly these sources. Returns False if the kernel rejects the filter."""
    if not sources:
        _detach_filter(listener)
        return True
    try:
        code = b"".join(struct.pack("HBBI", *instruction) for instruction in build_filter(sources))
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        _detach_filter(listener)  # the previous filter may contain addresses whose ban has ended
        return False
    return True


def _detach_filter(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # no filter is attached
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
