"""Waits in tests: until a polled condition is true, until bytes are read, to check that nothing happens."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import socket
import struct
import termios
from collections.abc import Awaitable, Callable

_TCP_CLOSE = 7  # State of a socket that has been reset.
_TIMER_ZERO_WINDOW_PROBE = 4  # Timer of a socket whose peer has no receive window.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1


async def wait_until(condition: Callable[[], bool | Awaitable[bool]], timeout_seconds: float = 20.0) -> None:
    """Poll a condition until it is true. Raises TimeoutError after `timeout_seconds`.

    The pause between two checks grows, because a check may be expensive and the condition may take long.
    """
    pause = 0.001
    async with asyncio.timeout(timeout_seconds):
        while not await _evaluate(condition):
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)


async def _evaluate(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    result = condition()
    return await result if inspect.isawaitable(result) else result


async def assert_never(condition: Callable[[], bool | Awaitable[bool]], seconds: float) -> None:
    """Check for `seconds` that the condition is never true. Raises AssertionError as soon as it is true."""
    try:
        await wait_until(condition, seconds)
    except TimeoutError:
        return
    raise AssertionError("the condition holds, although it never should")


async def assert_nothing_received(reader: asyncio.StreamReader, seconds: float) -> None:
    """Check for `seconds` that nothing is received, not even EOF. Raises AssertionError otherwise."""
    try:
        async with asyncio.timeout(seconds):
            received = await reader.read(65_536)
    except TimeoutError:
        return
    raise AssertionError(f"received {received[:100]!r}" if received else "received EOF")


async def wait_until_read(writer: asyncio.StreamWriter) -> None:
    """Wait until the peer, on this machine, has read all written data, so that later data arrives separately.

    Raises ConnectionResetError if the peer has closed.
    """
    own_socket: socket.socket = writer.get_extra_info("socket")
    peer_address, own_address = writer.get_extra_info("peername"), writer.get_extra_info("sockname")

    def is_read() -> bool:
        if (
            writer.is_closing()
            or own_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
        ):
            raise ConnectionResetError("the peer has closed the connection")
        # Check the send queue before the peer's receive queue. In the other order, both checks would miss
        # data that arrives between them.
        (sent,) = struct.unpack("i", fcntl.ioctl(own_socket, termios.TIOCOUTQ, bytes(4)))
        return not (
            writer.transport.get_write_buffer_size() or sent or _unread_bytes(peer_address, own_address)
        )

    await wait_until(is_read)


async def wait_until_peer_blocked(writer: asyncio.StreamWriter) -> None:
    """Wait until the peer, on this machine, cannot send more because all buffers are full of unread data."""
    peer_address, own_address = writer.get_extra_info("peername"), writer.get_extra_info("sockname")

    def is_blocked() -> bool:
        socket_info = _query_socket(peer_address, own_address)
        return bool(socket_info) and socket_info[18] == _TIMER_ZERO_WINDOW_PROBE

    await wait_until(is_blocked)


def _unread_bytes(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return how many bytes `local` has received from `remote` and not read yet."""
    socket_info = _query_socket(local, remote)
    unread: int = struct.unpack_from("=I", socket_info, 72)[0] if socket_info else 0
    return unread


def _query_socket(local: tuple[str, int], remote: tuple[str, int]) -> bytes:
    """Return the kernel's data about a socket (sock_diag(7)), as `ss` gets it; empty if it is closed."""
    ports = struct.pack("!HH", local[1], remote[1])
    addresses = b"".join(socket.inet_aton(host).ljust(16, b"\0") for host, _ in (local, remote))
    socket_id = ports + addresses + struct.pack("=Iq", 0, -1)
    request = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 0) + socket_id
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(
            struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request
        )
        response = kernel.recv(4096)
    return response if struct.unpack_from("=H", response, 4)[0] == _SOCK_DIAG_BY_FAMILY else b""
