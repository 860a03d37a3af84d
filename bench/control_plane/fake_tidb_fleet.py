"""Thousands of fake TiDB servers in one process, for the control plane to discover and probe.

One pair of ports on all of 127.0.0.0/8: each address is a node with a MySQL greeting and `GET /status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable

from controlplane.etcd.client import EtcdClient
from sandbox.ports import Ports
from sandbox.tidb_sim.greeting import build_greeting, new_salt

_MAX_CONCURRENT_REGISTRATIONS = 50
_VERSION = "8.0.11-TiDB-v8.5.3"
TOPOLOGY_PREFIX = "/topology/tidb/"


class FakeTidbFleet:
    """Fake nodes by number. They accept no sessions."""

    def __init__(self, sql_port: int, status_port: int) -> None:
        self.sql_port, self.status_port = sql_port, status_port
        payload = build_greeting(_VERSION, 1, new_salt())
        self._greeting_packet = len(payload).to_bytes(3, "little") + b"\0" + payload
        body = json.dumps({"connections": 0, "version": _VERSION, "git_hash": "stand-in"}).encode()
        self._status_response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        self._connections: set[asyncio.StreamWriter] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, ports: Ports) -> AsyncIterator[FakeTidbFleet]:
        """Serve on all addresses while the block runs."""
        nodes = cls(ports.allocate(), ports.allocate())
        async with contextlib.AsyncExitStack() as stack:
            for serve, port in ((nodes._serve_sql, nodes.sql_port), (nodes._serve_status, nodes.status_port)):
                server = await asyncio.start_server(serve, "0.0.0.0", port, backlog=1024)
                stack.callback(server.close)
            try:
                yield nodes
            finally:
                for writer in nodes._connections:
                    writer.transport.abort()

    def address(self, number: int) -> str:
        """Return the SQL address of node `number`, from 0 to 64,515."""
        return f"{_ip_address(number)}:{self.sql_port}"

    async def register(self, client: EtcdClient, number: int) -> None:
        """Register a node as TiDB does."""
        await register(client, self.address(number), self.status_port)

    async def unregister(self, client: EtcdClient, number: int) -> None:
        """Delete a node's registration."""
        await client.delete(f"{TOPOLOGY_PREFIX}{self.address(number)}/", prefix=True)

    async def _serve_sql(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            writer.write(self._greeting_packet)
            await reader.read()
        except OSError:
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _serve_status(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self._status_response)
        except (OSError, EOFError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


async def register(client: EtcdClient, address: str, status_port: int) -> None:
    """Write both keys of a node, `info` first as TiDB does (pingcap/tidb pkg/domain/serverinfo/syncer.go).

    `ttl` has no lease here: it stays until it is deleted.
    """
    info = {
        "version": "v8.5.3",
        "git_hash": "stand-in",
        "ip": address.rpartition(":")[0],
        "status_port": status_port,
        "deploy_path": "/tidb-server",
        "start_timestamp": int(time.time()),
        "labels": {},
    }
    await client.put(f"{TOPOLOGY_PREFIX}{address}/info", json.dumps(info).encode())
    await client.put(f"{TOPOLOGY_PREFIX}{address}/ttl", str(time.time_ns()).encode())


def _ip_address(number: int) -> str:
    return f"127.9.{number // 254}.{number % 254 + 1}"


async def register_all(client: EtcdClient, addresses: Iterable[str], status_port: int) -> None:
    """Register many nodes concurrently."""
    remaining = iter(addresses)

    async def register_remaining() -> None:
        for address in remaining:
            await register(client, address, status_port)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_MAX_CONCURRENT_REGISTRATIONS):
            tasks.create_task(register_remaining())
