"""Nodes with session migration, an Envoy in front of them, and clients that must not notice migrations."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
    """Properties of a node. `has_signing_certificate`: whether it can sign session tokens."""

    migration: MigrationRules = field(default_factory=MigrationRules)
    has_signing_certificate: bool = True
    release: str = DEFAULT_RELEASE
    graceful_wait: float = 0.0
    """Seconds of TiDB's `graceful-wait-before-shutdown`."""
    host: str = "127.0.0.1"
    requires_proxy_header: bool = False
    """Whether the node rejects connections without a PROXY header."""

    def settings(self, mariadb: MariaDb, signing: SessionCertificate, tls: PemFiles | None) -> SimSettings:
        """Return the settings of the node's simulated server, which requires TLS if `tls` is set."""
        sql_tls = None if tls is None else SqlTlsFiles(tls.cert, tls.key)
        rules = session_rules(
            mariadb,
            migration=self.migration,
            tls=sql_tls,
            require_secure_transport=tls is not None,
            requires_proxy_header=self.requires_proxy_header,
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
    """Nodes with a shared signing certificate, and an Envoy.

    `other_endpoints`: endpoints of additional fake nodes. `tls`: certificates for both sides of Envoy, None
    if neither side uses TLS. `live_settings`: those that `drain` publishes.
    """

    proxy: ModuleEnvoy
    nodes: list[TidbSim]
    other_endpoints: Sequence[str]
    endpoints: Path
    tls: PemFiles | None
    live_settings: Mapping[str, Any] = field(default_factory=dict)
    answer_clients: list[AnswerClient] = field(default_factory=list)

    def drain(self, *drained: TidbSim | str) -> None:
        """Publish these nodes, and no others, as draining."""
        hosts = to_hosts([*self.nodes, *self.other_endpoints], drained)
        publish_nodes(self.endpoints, hosts, live_settings=self.live_settings)

    @property
    def client_tls(self) -> ssl.SSLContext | None:
        """A client's TLS context; None without TLS."""
        return None if self.tls is None else ssl.create_default_context(cafile=str(self.tls.ca))

    async def connect_driver(self, **options: Any) -> Any:
        """Connect with a driver (asyncmy)."""
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
        """Connect a client that parses whole answers. `options` are those of AnswerClient.login."""
        proxy = self.proxy
        client = await with_timeout(
            AnswerClient.login(proxy.host, proxy.port, capabilities, tls=self.client_tls, **options)
        )
        self.answer_clients.append(client)
        return client

    async def close_sessions(self) -> None:
        """Abort all sessions except those of drivers. Wait until the nodes have no sessions."""
        self.abort_sessions()
        await wait_until(lambda: not any(self.sessions))

    def abort_sessions(self) -> None:
        """Abort all sessions except those of drivers."""
        writers = [
            *(raw.writer for raw in self.proxy.clients),
            *(client.writer for client in self.answer_clients),
        ]
        for writer in writers:
            writer.transport.abort()
        self.proxy.clients.clear()
        self.answer_clients.clear()

    async def connect_raw(self, capabilities: Capability = CAPABILITIES) -> RawClient:
        """Connect and log in a client that can send any packet. It is aborted at the end."""
        if self.tls is not None:
            return await connect_with_tls(self.proxy, self.tls, capabilities)
        client = await self.proxy.connect()
        assert (await with_timeout(client.login(capabilities)))[0] == 0x00
        return client

    @property
    def sessions(self) -> list[int]:
        """The number of connections of each node."""
        return [node.node.connections for node in self.nodes]

    async def wait_session_counts(self, *sessions: int) -> None:
        """Wait until the nodes have these numbers of connections."""
        await wait_until(lambda: self.sessions == list(sessions))

    async def wait_sessions_changed(self) -> None:
        """Wait until a session has arrived at a node or has left a node."""
        before = self.sessions
        await wait_until(lambda: self.sessions != before)

    async def migrate_all(self) -> None:
        """Migrate all sessions, which must be on one node, to other nodes."""
        (source,) = (node for node in self.nodes if node.node.connections)
        count = source.node.connections
        self.drain(source, *self.other_endpoints)
        await wait_until(lambda: source.node.connections == 0 and sum(self.sessions) == count)

    async def count_migrations(self, result: str, reason: str) -> int:
        """Return the number of migrations with this result in the module's last report (one a second)."""
        return sum(
            count
            for (name, labels), count in (await self.proxy.metrics()).items()
            if name == "migrations" and labels[1:] == (reason, result)
        )

    async def wait_pinned(self, reason: str) -> None:
        """Wait until one session at the first node is reported as pinned for this reason."""
        await self.proxy.wait_for_metrics({("sessions_pinned", self.nodes[0].sql_address, reason): 1})

    async def wait_stayed(self, reason: str, times: int = 1) -> None:
        """Wait until this many migrations have failed for this reason."""

        async def have_failed() -> bool:
            return await self.count_migrations("stayed", reason) >= times

        await wait_until(have_failed)

    def pop_violations(self) -> list[str]:
        """Return the protocol violations that the nodes have seen since the last call."""
        violations = [violation for node in self.nodes for violation in node.node.violations]
        for node in self.nodes:
            node.node.violations.clear()
        return violations


def to_hosts(nodes: Sequence[TidbSim | str], drained: Sequence[TidbSim | str]) -> list[Host]:
    """Return the nodes as Envoy's hosts."""
    return [
        Host(
            node if isinstance(node, str) else node.sql_address,
            state="draining" if node in drained else "active",
        )
        for node in nodes
    ]


def with_tls_on_both_sides(config: ModuleConfig, tls: PemFiles) -> ModuleConfig:
    """Require TLS towards clients and nodes."""
    client = {"tls": "required", "cert": str(tls.cert), "key": str(tls.key)}
    node = {"tls": "required", "ca": str(tls.ca), "verify": "full"}
    return replace(config, client={**config.client, **client}, node={**config.node, **node})


@asynccontextmanager
async def run_fleet(
    directory: Path,
    mariadb: MariaDb,
    signing: SessionCertificate | None = None,
    config: ModuleConfig | None = None,
    specs: Sequence[NodeSpec] = TWO_NODES,
    *,
    tls: PemFiles | None = None,
    others: Sequence[str] = (),
    drained: Sequence[int] = (),
    workers: int = 1,
    change_bootstrap: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[MigratingFleet]:
    """Run a fleet. At the end, check that no node saw a protocol violation.

    Initially the nodes at the positions `drained`, and all `others`, are drained. `change_bootstrap` modifies
    Envoy's bootstrap.
    """
    signing = signing or SessionCertificate.load_or_create(directory / "signing")
    endpoints = directory / "endpoints.json"
    config = replace(config or ModuleConfig(), endpoints=endpoints)
    async with AsyncExitStack() as exit_stack:
        nodes = [
            await exit_stack.enter_async_context(TidbSim(spec.settings(mariadb, signing, tls)))
            for spec in specs
        ]
        hosts = to_hosts([*nodes, *others], [*(nodes[position] for position in drained), *others])
        if tls is not None:
            config = with_tls_on_both_sides(config, tls)
        bootstrap_config = bootstrap(hosts, config)
        change_bootstrap(bootstrap_config)
        proxy = ModuleEnvoy(json.dumps(bootstrap_config), directory, concurrency=workers)
        async with serve_envoy(proxy, config):
            running_fleet = MigratingFleet(proxy, nodes, others, endpoints, tls, config.live_settings)
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
    """Open a direct session at MariaDB. Its answers are the expected answers."""
    client = await AnswerClient.login("127.0.0.1", mariadb.port, capabilities, **options)
    try:
        yield client
        await client.quit()
    finally:
        client.writer.transport.abort()


_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd(2), which is the same on all architectures."""


@contextmanager
def socket_of_process(pid: int, port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of a process's only socket connected to `port`. Tests read the socket's options."""
    matches = []
    process = os.pidfd_open(pid)
    with ExitStack() as exit_stack:
        exit_stack.callback(os.close, process)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if not os.readlink(file).startswith("socket:"):
                continue
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(file.name), 0)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), "cannot duplicate a descriptor of another process")
            candidate = exit_stack.enter_context(socket.socket(fileno=descriptor))
            with suppress(OSError):
                if candidate.getpeername()[1] == port:
                    matches.append(candidate)
        (connection,) = matches
        yield connection
