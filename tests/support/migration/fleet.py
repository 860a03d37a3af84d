"""Nodes whose sessions move, an Envoy before them, and clients that must not notice."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncmy

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import DEFAULT_RELEASE
from sandbox.tidb_sim.packets import Capability
from sandbox.tidb_sim.proxy_header import ProxyProtocol
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.clients.server import PemFiles
from tests.support.migration.sql_client import AnswerClient
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap, publish_nodes
from tests.support.module.envoy import ModuleEnvoy, connect_with_tls, serve_envoy, with_timeout
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient, session_rules
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class NodeSpec:
    """What is special about a node. `signs`: it has the certificate of session tokens."""

    migration: MigrationRules = field(default_factory=MigrationRules)
    has_signing_certificate: bool = True
    release: str = DEFAULT_RELEASE
    graceful_wait: float = 0.0
    """Seconds."""
    host: str = "127.0.0.1"
    requires_proxy_header: bool = False
    """Without a PROXY header it lets nobody in."""

    def settings(self, mariadb: MariaDb, signing: SessionCertificate, tls: PemFiles | None) -> SimSettings:
        """For its stand-in; with certificates, over TLS or not at all."""
        secured = None if tls is None else SqlTlsFiles(tls.cert, tls.key)
        header = (
            ProxyProtocol(networks=("*",), fallbackable=False)
            if self.requires_proxy_header
            else ProxyProtocol()
        )
        rules = session_rules(
            mariadb,
            migration=self.migration,
            tls=secured,
            require_secure_transport=tls is not None,
            proxy_protocol=header,
        )
        return SimSettings(
            rules,
            host=self.host,
            advertise_address=self.host,
            release=self.release,
            graceful_wait=self.graceful_wait,
            **(signing.settings if self.has_signing_certificate else {}),
        )


TWO_NODES = (NodeSpec(), NodeSpec())
THREE_NODES = (NodeSpec(), NodeSpec(), NodeSpec())


@dataclass
class MigratingFleet:
    """Nodes that share a signing certificate, and an Envoy before them. `others`: endpoints of anything else.

    `tls`: of both sides; None: both are plain.
    """

    proxy: ModuleEnvoy
    nodes: list[TidbSim]
    other_endpoints: Sequence[str]
    endpoints: Path
    tls: PemFiles | None
    answer_clients: list[AnswerClient] = field(default_factory=list)

    def drain(self, *drained: TidbSim | str) -> None:
        """From now on sessions are to leave these nodes, and no others."""
        publish_nodes(self.endpoints, to_hosts([*self.nodes, *self.other_endpoints], drained))

    @property
    def client_tls(self) -> ssl.SSLContext | None:
        """For a client's TLS; None without."""
        return None if self.tls is None else ssl.create_default_context(cafile=str(self.tls.ca))

    async def connect_driver(self, **options: Any) -> Any:
        """A driver's connection."""
        return await asyncmy.connect(
            **{
                "host": self.proxy.host,
                "port": self.proxy.port,
                "user": "root",
                "autocommit": True,
                "ssl": self.client_tls,
                **options,
            }
        )

    async def connect_answer_client(
        self, capabilities: Capability = CAPABILITIES, **options: Any
    ) -> AnswerClient:
        """A client whose answers can be compared (options: of Wire.login); cut at the end, if not before."""
        proxy = self.proxy
        wire = await with_timeout(
            AnswerClient.login(proxy.host, proxy.port, capabilities, tls=self.client_tls, **options)
        )
        self.answer_clients.append(wire)
        return wire

    async def close_sessions(self) -> None:
        """Cut all sessions, but those of drivers; returns when the nodes have none."""
        self.abort_sessions()
        await wait_until(lambda: not any(self.sessions))

    def abort_sessions(self) -> None:
        """Cut all sessions, but those of drivers."""
        writers = [
            *(raw.writer for raw in self.proxy.clients),
            *(wire.writer for wire in self.answer_clients),
        ]
        for writer in writers:
            writer.transport.abort()
        self.proxy.clients.clear()
        self.answer_clients.clear()

    async def connect_raw(self, capabilities: Capability = CAPABILITIES) -> RawClient:
        """A client that can send anything, logged in; cut at the end, if not before."""
        if self.tls is not None:
            return await connect_with_tls(self.proxy, self.tls, capabilities)
        client = await self.proxy.connect()
        assert (await with_timeout(client.login(capabilities)))[0] == 0x00
        return client

    @property
    def sessions(self) -> list[int]:
        """How many connections each node has."""
        return [node.node.connections for node in self.nodes]

    async def wait_session_counts(self, *sessions: int) -> None:
        """Returns when the nodes have so many connections."""
        await wait_until(lambda: self.sessions == list(sessions))

    async def wait_sessions_changed(self) -> None:
        """Returns when a session has come to a node, or left one."""
        before = self.sessions
        await wait_until(lambda: self.sessions != before)

    async def migrate_all(self) -> None:
        """All sessions, which are on one node, go to other nodes."""
        (left,) = (node for node in self.nodes if node.node.connections)
        count = left.node.connections
        self.drain(left, *self.other_endpoints)
        await wait_until(lambda: left.node.connections == 0 and sum(self.sessions) == count)

    async def count_migrations(self, result: str, reason: str) -> int:
        """How many moves have ended so, as far as the module has told; it does once a second."""
        return sum(
            count
            for (name, labels), count in (await self.proxy.metrics()).items()
            if name == "migrations" and labels[1:] == (reason, result)
        )

    async def wait_pinned(self, reason: str) -> None:
        """Returns when one session at the first node is reported to stay there for this reason."""
        await self.proxy.wait_for_metrics({("sessions_pinned", self.nodes[0].sql_address, reason): 1})

    async def wait_stayed(self, reason: str, times: int = 1) -> None:
        """Returns when so many moves have failed for this reason."""

        async def have_failed() -> bool:
            return await self.count_migrations("stayed", reason) >= times

        await wait_until(have_failed)

    def pop_violations(self) -> list[str]:
        """What nodes have seen of a client that breaks the protocol, since this was asked."""
        seen = [what for node in self.nodes for what in node.node.violations]
        for node in self.nodes:
            node.node.violations.clear()
        return seen


def to_hosts(all_: Sequence[TidbSim | str], drained: Sequence[TidbSim | str]) -> list[Host]:
    """Nodes as Envoy is told of them."""
    return [
        Host(
            node if isinstance(node, str) else node.sql_address,
            state="draining" if node in drained else "active",
        )
        for node in all_
    ]


def with_tls_on_both_sides(parts: ModuleConfig, tls: PemFiles) -> ModuleConfig:
    """With TLS towards clients and nodes, which all must have."""
    client = {"tls": "required", "cert": str(tls.cert), "key": str(tls.key)}
    node = {"tls": "required", "ca": str(tls.ca), "verify": "full"}
    return replace(parts, client={**parts.client, **client}, node={**parts.node, **node})


@asynccontextmanager
async def run_fleet(
    directory: Path,
    mariadb: MariaDb,
    signing: SessionCertificate | None = None,
    parts: ModuleConfig | None = None,
    specs: Sequence[NodeSpec] = TWO_NODES,
    *,
    tls: PemFiles | None = None,
    others: Sequence[str] = (),
    drained: Sequence[int] = (),
    workers: int = 1,
    change_bootstrap: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[MigratingFleet]:
    """No node may see a violation of the protocol.

    From the start the nodes at the positions `drained`, and all `others`, get no sessions. `change`: what is
    special about Envoy's bootstrap.
    """
    signing = signing or SessionCertificate.load_or_create(directory / "signing")
    endpoints = directory / "endpoints.json"
    parts = replace(parts or ModuleConfig(), endpoints=endpoints)
    async with AsyncExitStack() as running:
        nodes = [
            await running.enter_async_context(TidbSim(one.settings(mariadb, signing, tls))) for one in specs
        ]
        known = to_hosts([*nodes, *others], [*(nodes[position] for position in drained), *others])
        wanted = parts if tls is None else with_tls_on_both_sides(parts, tls)
        tree = bootstrap(known, wanted)
        change_bootstrap(tree)
        proxy = ModuleEnvoy(json.dumps(tree), directory, concurrency=workers)
        async with serve_envoy(proxy, wanted):
            running_fleet = MigratingFleet(proxy, nodes, others, endpoints, tls)
            try:
                yield running_fleet
                await running_fleet.close_sessions()
            finally:
                running_fleet.abort_sessions()
        assert running_fleet.pop_violations() == []


@asynccontextmanager
async def mariadb_session(
    mariadb: MariaDb, capabilities: Capability = CAPABILITIES, **options: Any
) -> AsyncIterator[AnswerClient]:
    """A session of MariaDB's own, which does not move: what it answers is what others must answer."""
    wire = await AnswerClient.login("127.0.0.1", mariadb.port, capabilities, **options)
    try:
        yield wire
        await wire.quit()
    finally:
        wire.writer.transport.abort()


async def query_rows(client: Any, statement: str) -> list[tuple[Any, ...]]:
    """The rows of a statement."""
    async with client.cursor() as cursor:
        await cursor.execute(statement)
        return list(await cursor.fetchall())


_PIDFD_GETFD = 438
"""The number of the system call, which is the same on all machines."""


@contextmanager
def socket_of_process(pid: int, port: int) -> Iterator[socket.socket]:
    """The only connection of a process to that port: the socket itself, to ask it for its options."""
    found = []
    process = os.pidfd_open(pid)
    with ExitStack() as held:
        held.callback(os.close, process)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if not os.readlink(file).startswith("socket:"):
                continue
            got = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(file.name), 0)
            if got < 0:
                raise OSError(ctypes.get_errno(), "a descriptor of another process cannot be had")
            candidate = held.enter_context(socket.socket(fileno=got))
            with suppress(OSError):
                if candidate.getpeername()[1] == port:
                    found.append(candidate)
        (connection,) = found
        yield connection
