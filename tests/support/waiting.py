"""Waiting in tests: for what no event tells, for bytes to be read, for nothing to happen."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import socket
import struct
import termios
from collections.abc import Awaitable, Callable

_TCP_CLOSE = 7  # the state of a socket that has been reset
_TIMER_ZERO_WINDOW_PROBE = 4  # the timer of a socket whose peer has no room
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1


async def wait_until(condition: Callable[[], bool | Awaitable[bool]], timeout_seconds: float = 20.0) -> None:
    """Returns when the condition holds; TimeoutError when it does not in time. For what tells no event.

    It is looked at ever less often: to look may be dear, and what has not come yet may take long.
    """
    pause = 0.001
    async with asyncio.timeout(timeout_seconds):
        while not await _evaluate(condition):
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)


async def _evaluate(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    held = condition()
    return await held if inspect.isawaitable(held) else held


async def assert_never(condition: Callable[[], bool | Awaitable[bool]], seconds: float) -> None:
    """Returns after so long; AssertionError at once when the condition holds meanwhile."""
    try:
        await wait_until(condition, seconds)
    except TimeoutError:
        return
    raise AssertionError("what may not be is")


async def assert_nothing_received(reader: asyncio.StreamReader, seconds: float) -> None:
    """Returns after so long; AssertionError at once when anything comes meanwhile, the end included."""
    try:
        async with asyncio.timeout(seconds):
            came = await reader.read(65_536)
    except TimeoutError:
        return
    raise AssertionError(f"came: {came[:100]!r}" if came else "the end came")


async def wait_until_read(writer: asyncio.StreamWriter) -> None:
    """Returns when the peer, on this machine, has read all that was written: it sees apart what follows.

    ConnectionResetError when the peer has gone.
    """
    own_socket: socket.socket = writer.get_extra_info("socket")
    there, here = writer.get_extra_info("peername"), writer.get_extra_info("sockname")

    def is_read() -> bool:
        if (
            writer.is_closing()
            or own_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
        ):
            raise ConnectionResetError("nobody reads it any more")
        # Both, in this order: what has not arrived there is not read either.
        (sent,) = struct.unpack("i", fcntl.ioctl(own_socket, termios.TIOCOUTQ, bytes(4)))
        return not (writer.transport.get_write_buffer_size() or sent or _unread_bytes(there, here))

    await wait_until(is_read)


async def wait_until_peer_blocked(writer: asyncio.StreamWriter) -> None:
    """Returns when the peer, on this machine, cannot send on: all is full with what we have not read."""
    there, here = writer.get_extra_info("peername"), writer.get_extra_info("sockname")

    def is_blocked() -> bool:
        socket_info = _query_socket(there, here)
        return bool(socket_info) and socket_info[18] == _TIMER_ZERO_WINDOW_PROBE

    await wait_until(is_blocked)


def _unread_bytes(here: tuple[str, int], there: tuple[str, int]) -> int:
    """Bytes that `here` has got from `there` and not read yet."""
    socket_info = _query_socket(here, there)
    unread: int = struct.unpack_from("=I", socket_info, 72)[0] if socket_info else 0
    return unread


def _query_socket(here: tuple[str, int], there: tuple[str, int]) -> bytes:
    """What the kernel tells of that socket (sock_diag(7)), as it tells `ss`; nothing: it has been closed."""
    ports = struct.pack("!HH", here[1], there[1])
    addresses = b"".join(socket.inet_aton(host).ljust(16, b"\0") for host, _ in (here, there))
    which = ports + addresses + struct.pack("=Iq", 0, -1)
    asked = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 0) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
        answer = kernel.recv(4096)
    return answer if struct.unpack_from("=H", answer, 4)[0] == _BY_FAMILY else b""
