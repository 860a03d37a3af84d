"""A node closes the connection of an idle session whose states are not known: the client sees it at once."""

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
from tests.support.migration.fault_arena import node_tls_context
from tests.support.migration.scripted_node import OK_PACKET, GateAction, NodeConnection, ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, connect_with_tls, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient

AT_ONCE = 1.0
"""Seconds; it takes about a millisecond."""
KILLED = frame(0, err(1927, "Connection was killed", "70100"))
"""The error that servers other than TiDB send before they close."""
BEGUN = frame(1, ok(AUTOCOMMIT | IN_TRANSACTION))


@dataclass(frozen=True)
class Served:
    """An Envoy, and the node behind it."""

    proxy: ModuleEnvoy
    node: ScriptedNode
    certificates: PemFiles
    client_tls: bool

    async def client(self) -> RawClient:
        if self.client_tls:
            return await connect_with_tls(self.proxy, self.certificates)
        client = await self.proxy.connect()
        assert (await with_timeout(client.login()))[0] == 0
        return client


@asynccontextmanager
async def served(directory: Path, tls: Sequence[str]) -> AsyncIterator[Served]:
    certificates = PemFiles.create(directory / "certificates")
    client = {"tls": "required", "cert": str(certificates.cert), "key": str(certificates.key)}
    node = {"tls": "required", "ca": str(certificates.ca), "verify": "ca"}
    parts = ModuleConfig(
        client=client if "client" in tls else {},
        node=node if "node" in tls else {"allow_cleartext_backend": True},
    )
    actor = ScriptedNode("n1", node_tls_context(certificates) if "node" in tls else None)
    actor.canned_answers[b"begin"] = BEGUN
    async with actor.listening(), run_envoy(directory, [Host(actor.endpoint, "n1")], parts) as proxy:
        yield Served(proxy, actor, certificates, "client" in tls)


async def ends(link: NodeConnection, way: str) -> None:
    match way:
        case "FIN":
            await link.send_fin()
        case "error, FIN":
            link.send(KILLED)
            await link.send_fin()
        case "RST":
            await link.reset()


async def command(client: RawClient, text: str) -> None:
    client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + text.encode()]))
    _, first = await with_timeout(client.read_packet())
    for _ in range(0 if first[0] == 0 else first[0] + 3):
        await with_timeout(client.read_packet())


TLS = [(), ("client",), ("node",), ("client", "node")]
TRIES = 3
"""How often a case is tried in which two events may come in either order."""
BEFORE = (0, 1, 6)
"""How many statements a session has run; after some the module reads the connection itself."""


@pytest.mark.parametrize("tls", TLS, ids="-".join)
async def test_the_client_of_an_idle_session_sees_the_end_at_once(tmp_path: Path, tls: Sequence[str]) -> None:
    late: list[tuple[str, str, int]] = []
    async with served(tmp_path, tls) as here:
        for way, first, more in itertools.product(("FIN", "error, FIN", "RST"), ("", "begin"), BEFORE):
            client = await here.client()
            for statement in [*([first] if first else []), *["select 1"] * more]:
                await command(client, statement)
            await ends(here.node.connections[-1], way)
            try:
                async with asyncio.timeout(AT_ONCE):
                    received = await client.reader.read()
            except TimeoutError:
                late.append((way, first, more))
                continue
            assert received == (KILLED if way == "error, FIN" else b"")
    assert not late


@pytest.mark.parametrize("tls", TLS, ids="-".join)
async def test_the_client_sees_an_end_right_after_an_answer_at_once(
    tmp_path: Path, tls: Sequence[str]
) -> None:
    """Both may be there when the answer is read, and then there is no event for the end."""
    late: list[tuple[str, int]] = []
    async with served(tmp_path, tls) as here:
        for way, more, _ in itertools.product(("FIN", "RST"), BEFORE, range(TRIES)):
            client = await here.client()
            for _ in range(more):
                await command(client, "select 1")
            gate = here.node.hold_at("statement")
            client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + b"do 1"]))
            link = await gate.wait_reached()
            link.send(OK_PACKET)
            await ends(link, way)
            gate.proceed(GateAction.STAY_SILENT)
            try:
                async with asyncio.timeout(AT_ONCE):
                    assert await client.reader.read() == OK_PACKET
            except TimeoutError:
                late.append((way, more))
    assert not late
