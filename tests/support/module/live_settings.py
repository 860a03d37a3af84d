"""An Envoy with the module, whose control plane changes settings while sessions are open."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from sandbox.ports import Ports
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, frame
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import XdsTestBed, make_node_plan, make_plan, run_xds_test_bed
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.module.bootstrap import require_module
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

Sections = Mapping[str, Any]

_SYS_PIDFD_GETFD = 438  # the same on all architectures
_PING = 0x0E


class ScriptedNodes:
    """Fake nodes that accept every login. `behavior` changes what they do with new connections."""

    def __init__(self) -> None:
        self.behavior = "serve"
        """`serve`; `close` the connection at once; be `silent`; `close first`: only the first node closes."""
        self.headers: list[bytes] = []
        """The PROXY headers of version 1 that the nodes got."""
        self.servers: list[FakeServer] = []

    async def handle(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to the node of this number, from 0."""
        if self.behavior == "close" or (self.behavior == "close first" and number == 0):
            writer.close()
            return
        if self.behavior == "silent":
            return
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.COMPRESS))
        head = await reader.readexactly(4)
        if head == b"PROX":
            self.headers.append(head + await reader.readline())
            head = await reader.readexactly(4)
        sequence = head[3]
        await reader.readexactly(int.from_bytes(head[:3], "little"))
        writer.write(frame(sequence + 1, OK_PAYLOAD))
        node = RawClient(reader, writer)
        while True:
            await node.read_packet()
            writer.write(frame(1, OK_PAYLOAD))

    def open_connections(self) -> int:
        """Return the number of open connections to all nodes."""
        return sum(not writer.is_closing() for server in self.servers for writer in server.writers)


class LiveEnvoy:
    """A test bed with open sessions."""

    def __init__(self, test_bed: XdsTestBed, nodes: ScriptedNodes) -> None:
        self.test_bed, self.nodes = test_bed, nodes
        self.clients: list[RawClient] = []

    async def connect(self, source: str = "127.0.0.1") -> RawClient:
        """Connect a client that can send any packet, from this local address."""
        connecting = asyncio.open_connection("127.0.0.1", self.test_bed.sql_port, local_addr=(source, 0))
        client = RawClient(*await with_timeout(connecting))
        self.clients.append(client)
        return client

    async def log_in(self) -> RawClient:
        client = await self.connect()
        assert (await with_timeout(client.login()))[0] == 0
        return client

    async def first_payload(self, source: str = "127.0.0.1", seconds: float = 10.0) -> bytes | None:
        """Return the first packet that a new client gets.

        Empty if its connection is closed without one; None if there is none after `seconds`.
        """
        client = await self.connect(source)
        try:
            async with asyncio.timeout(seconds):
                return (await client.read_packet())[1]
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        except TimeoutError:
            return None
        finally:
            client.writer.transport.abort()

    def change(self, sections: Sections) -> None:
        """Reload these settings; other values of a section are those of the start."""
        self.test_bed.settings = self.test_bed.with_settings(dict(sections))
        self.test_bed.server.configure(self.test_bed.settings)

    async def seconds_until(self, is_in_force: Callable[[], Awaitable[bool]]) -> float:
        """Wait until a change is in force. Return how long that took."""
        begin = time.monotonic()
        await wait_until(is_in_force)
        return time.monotonic() - begin

    async def expect_undisturbed(self, sessions: list[RawClient]) -> None:
        """Check that these sessions still work, and that Envoy has replaced no listener or cluster."""
        for session in sessions:
            assert (await with_timeout(session.send_command(_PING)))[0] == 0
        page = await self.test_bed.envoy.get("/stats?filter=modified|total_listeners_draining")
        counts = {
            name: int(value) for name, value in (line.split(": ") for line in page.text.splitlines() if line)
        }
        assert counts.keys() >= {"listener_manager.listener_modified", "cluster_manager.cluster_modified"}
        assert set(counts.values()) == {0}, counts
        assert self.test_bed.status.stale_resources == ()

    def socket_option(self, near: tuple[str, int], far: tuple[str, int], option: int) -> int:
        """Return a TCP option of Envoy's socket between these two addresses."""
        inode = _socket_inode(near, far)
        pid = self.test_bed.envoy.process.pid
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry) == f"socket:[{inode}]":
                    with socket.socket(fileno=_copy_descriptor(pid, int(entry.name))) as copied:
                        return copied.getsockopt(socket.IPPROTO_TCP, option)
        raise AssertionError(f"Envoy has no socket from {near} to {far}")


def _socket_inode(near: tuple[str, int], far: tuple[str, int]) -> str:
    """Return the inode of the socket at `near` that is connected to `far`."""

    def encoded(address: tuple[str, int]) -> str:
        return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"

    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = re.split(r"\s+", line.strip())
        if fields[1:3] == [encoded(near), encoded(far)]:
            return fields[9]
    raise AssertionError(f"there is no connection from {near} to {far}")


def _copy_descriptor(pid: int, descriptor: int) -> int:
    """Copy a descriptor of another process (pidfd_getfd(2))."""
    pidfd = os.pidfd_open(pid)
    try:
        copied: int = ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    assert copied >= 0, os.strerror(ctypes.get_errno())
    return copied


@contextlib.asynccontextmanager
async def run_live_envoy(
    ports: Ports,
    start_envoy: StartEnvoy,
    settings: Sections,
    *,
    nodes: int = 1,
    delta: bool = False,
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None,
) -> AsyncIterator[LiveEnvoy]:
    """Run a control plane with these settings, an Envoy with the module, and nodes.

    `handler` serves connections to nodes instead of `ScriptedNodes`.
    """
    scripted = ScriptedNodes()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(nodes):
            server = run_fake_server(handler or functools.partial(scripted.handle, number))
            scripted.servers.append(await stack.enter_async_context(server))
        test_bed = await stack.enter_async_context(
            run_xds_test_bed(
                ports, start_envoy, settings=dict(settings), module=require_module(), delta=delta
            )
        )
        plans = [
            make_node_plan(f"n{number}:4000", server.endpoint)
            for number, server in enumerate(scripted.servers)
        ]
        await test_bed.publish(make_plan(*plans))
        await wait_until(test_bed.envoy.is_live)
        live = LiveEnvoy(test_bed, scripted)
        try:
            yield live
        finally:
            for client in live.clients:
                client.writer.transport.abort()
