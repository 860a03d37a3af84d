"""When a node closes an idle session, Envoy disconnects the client at once.

Envoy has not saved the session's states, so it cannot restore the session on another node.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, MySqlCommand, err, frame, frames, ok
from tests.support.clients.server import PemFiles
from tests.support.migration.fault_envoy import node_tls_context
from tests.support.migration.scripted_node import OK_PACKET, GateAction, NodeConnection, ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, connect_with_tls, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient

MAX_SECONDS = 1.0
"""Time limit for the client's disconnection, which usually takes about a millisecond."""
KILLED = frame(0, err(1927, "Connection was killed", "70100"))
"""The error that MariaDB sends before it closes a killed session; TiDB sends none."""
BEGIN_OK = frame(1, ok(AUTOCOMMIT | IN_TRANSACTION))


@dataclass(frozen=True)
class Stack:
    """An Envoy and the node behind it."""

    proxy: ModuleEnvoy
    node: ScriptedNode
    certificates: PemFiles
    client_tls: bool

    async def connect(self) -> RawClient:
        if self.client_tls:
            return await connect_with_tls(self.proxy, self.certificates)
        client = await self.proxy.connect()
        assert (await with_timeout(client.login()))[0] == 0
        return client


@asynccontextmanager
async def run_stack(directory: Path, tls: Sequence[str]) -> AsyncIterator[Stack]:
    certificates = PemFiles.create(directory / "certificates")
    client = {"tls": "required", "cert": str(certificates.cert), "key": str(certificates.key)}
    node = {"tls": "required", "ca": str(certificates.ca), "verify": "ca"}
    config = ModuleConfig(
        client=client if "client" in tls else {},
        node=node if "node" in tls else {"allow_cleartext_backend": True},
    )
    scripted = ScriptedNode("n1", node_tls_context(certificates) if "node" in tls else None)
    scripted.canned_answers[b"begin"] = BEGIN_OK
    async with scripted.listening(), run_envoy(directory, [Host(scripted.endpoint, "n1")], config) as proxy:
        yield Stack(proxy, scripted, certificates, "client" in tls)


async def close_by_node(link: NodeConnection, how: str) -> None:
    match how:
        case "FIN":
            await link.send_fin()
        case "error, FIN":
            link.send(KILLED)
            await link.send_fin()
        case "RST":
            await link.reset()


async def run_query(client: RawClient, text: str) -> None:
    client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + text.encode()]))
    _, first = await with_timeout(client.read_packet())
    for _ in range(0 if first[0] == 0 else first[0] + 3):
        await with_timeout(client.read_packet())


TLS_SIDES = [(), ("client",), ("node",), ("client", "node")]
"""The sides of Envoy that use TLS."""
REPETITIONS = 3
"""Repetitions of each case in which two events may occur in either order."""
STATEMENT_COUNTS = (0, 1, 6)
"""Numbers of statements before the close. After a few statements the module, not Envoy, reads the socket."""


@pytest.mark.parametrize("tls", TLS_SIDES, ids="-".join)
async def test_idle_client_is_disconnected_at_once(tmp_path: Path, tls: Sequence[str]) -> None:
    delayed: list[tuple[str, str, int]] = []
    async with run_stack(tmp_path, tls) as stack:
        for how, initial, statement_count in itertools.product(
            ("FIN", "error, FIN", "RST"), ("", "begin"), STATEMENT_COUNTS
        ):
            client = await stack.connect()
            for statement in [*([initial] if initial else []), *["select 1"] * statement_count]:
                await run_query(client, statement)
            await close_by_node(stack.node.connections[-1], how)
            try:
                async with asyncio.timeout(MAX_SECONDS):
                    received = await client.reader.read()
            except TimeoutError:
                delayed.append((how, initial, statement_count))
                continue
            assert received == (KILLED if how == "error, FIN" else b"")
    assert not delayed


@pytest.mark.parametrize("tls", TLS_SIDES, ids="-".join)
async def test_client_is_disconnected_at_once_after_an_answer(tmp_path: Path, tls: Sequence[str]) -> None:
    """If Envoy reads the answer and the FIN or RST together, no separate event reports the end."""
    delayed: list[tuple[str, int]] = []
    async with run_stack(tmp_path, tls) as stack:
        for how, statement_count, _ in itertools.product(
            ("FIN", "RST"), STATEMENT_COUNTS, range(REPETITIONS)
        ):
            client = await stack.connect()
            for _ in range(statement_count):
                await run_query(client, "select 1")
            gate = stack.node.pause_at("statement")
            client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + b"do 1"]))
            link = await gate.wait_reached()
            link.send(OK_PACKET)
            await close_by_node(link, how)
            gate.proceed(GateAction.SEND_NOTHING)
            try:
                async with asyncio.timeout(MAX_SECONDS):
                    assert await client.reader.read() == OK_PACKET
            except TimeoutError:
                delayed.append((how, statement_count))
    assert not delayed
