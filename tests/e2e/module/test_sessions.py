"""Live sessions over two Envoys: list, KILL by the id of the handshake, and `tidevoy kill`."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.server import sends_mysql_greeting
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.greeting import build_greeting, new_salt, parse_greeting
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import (
    CountingClient,
    counting_client,
    get_events,
    open_session,
    reload_settings,
)
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, run_balanced_cluster
from tests.support.fake_servers import mysql_packet, run_fake_server
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

PROCESS_KILL = 0x0C
UNKNOWN_ID = 4_000_000_001
_END_SECONDS = 10
_STATEMENT = "select sleep(100)"
_SETTINGS = {"rebalance": {"enabled": False}}


@dataclass
class Victim:
    """A session and the id that its client got in the handshake."""

    client: CountingClient
    id: int

    async def wait_ended(self) -> None:
        """Wait until the session ends. Raises TimeoutError."""
        async with asyncio.timeout(_END_SECONDS):
            with suppress(ConnectionResetError):
                await self.client.reader.read()


class Fleet:
    """A cluster with two nodes and two Envoys."""

    def __init__(self, balanced: BalancedCluster, exit_stack: AsyncExitStack) -> None:
        self.stack, self.ports = balanced.stack, balanced.ports
        self._exit_stack = exit_stack

    async def connect(self, envoy: int = 0) -> CountingClient:
        return await open_session(self._exit_stack, self.ports[envoy])

    async def open_victim(self, envoy: int = 0) -> Victim:
        client = await self.connect(envoy)
        ((number,),) = await client.rows("select connection_id()")
        assert number is not None
        return Victim(client, int(number))

    async def sessions(self, **query: Any) -> dict[str, Any]:
        response = await self.stack.api.get("/v1/sessions", params=query)
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    async def session(self, id_: int) -> dict[str, Any] | None:
        """Return the live session with this id in its handshake. All Envoys must have answered."""
        answer = await self.sessions()
        assert answer["incomplete"] == []
        return next((session for session in answer["sessions"] if session["id"] == id_), None)

    async def wait_known(self) -> None:
        """Wait until both Envoys answer commands."""

        async def is_complete() -> bool:
            return not (await self.sessions())["incomplete"]

        await wait_until(is_complete, 15)

    async def wait_busy(self, victim: Victim) -> None:
        """Wait until the session executes a statement."""

        async def is_busy() -> bool:
            session = await self.session(victim.id)
            return session is not None and session["state"] == "busy"

        await wait_until(is_busy)

    async def move(self, victim: Victim) -> dict[str, Any]:
        """Move a session to the other node by a drain; return the session there."""
        before = await self.session(victim.id)
        assert before is not None
        path = f"/v1/nodes/{before['node']}"
        (await self.stack.api.post(f"{path}/drain")).raise_for_status()
        moved: dict[str, Any] = {}

        async def has_moved() -> bool:
            moved.update(await self.session(victim.id) or {})
            return bool(moved["moves"] > before["moves"])

        await wait_until(has_moved, 30)
        (await self.stack.api.post(f"{path}/undrain")).raise_for_status()
        assert moved["node"] != before["node"]
        assert moved["node_id"] != victim.id
        return moved


@asynccontextmanager
async def run_fleet(tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[Fleet]:
    start = run_balanced_cluster(tmp_path, mariadb, signing, nodes=2, envoys=2, settings=_SETTINGS)
    async with start as balanced, AsyncExitStack() as exit_stack:
        fleet = Fleet(balanced, exit_stack)
        await fleet.wait_known()
        yield fleet


async def test_kill_reaches_a_moved_session_through_another_envoy(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing) as fleet:
        killer = await fleet.connect(1)
        for form in ("statement", "command"):
            victim = await fleet.open_victim(0)
            await fleet.move(victim)
            if form == "statement":
                response = await killer.query(f"/* admin */ KILL {victim.id};")
            else:
                response = await killer.send_command(PROCESS_KILL, struct.pack("<I", victim.id))
            assert error_code(response) == 0
            await victim.wait_ended()
        # The session stays in step with its responses, also after pipelined commands.
        for text in ("do 1", f"KILL {UNKNOWN_ID}", "do 2"):
            killer.write_command(MySqlCommand.QUERY, text.encode())
        assert [error_code((await killer.read_packet())[1]) for _ in range(3)] == [0, 0, 0]
        assert await killer.rows("select 7") == [("7",)]


async def test_kill_query_stops_the_statement_of_a_moved_session(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing) as fleet:
        victim = await fleet.open_victim(0)
        await fleet.move(victim)
        victim.client.write_command(MySqlCommand.QUERY, _STATEMENT.encode())
        await fleet.wait_busy(victim)
        killer = await fleet.connect(1)
        assert error_code(await killer.query(f"KILL QUERY {victim.id}")) == 0
        async with asyncio.timeout(10):
            for _ in range(4):  # columns, EOF, and MariaDB's error in place of the row
                await victim.client.read_packet()
        assert error_code(await victim.client.query("do 1")) == 0


async def test_list_and_end_of_sessions(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing) as fleet:
        url = str(fleet.stack.api.base_url)
        idle, busy = await fleet.open_victim(0), await fleet.open_victim(1)
        await reload_settings(fleet.stack, statements={"digests": "on", "interval": 1})
        busy.client.write_command(MySqlCommand.QUERY, _STATEMENT.encode())
        await fleet.wait_busy(busy)
        answer = await fleet.sessions()
        assert [session["id"] for session in answer["sessions"]] == [busy.id, idle.id]
        assert answer["total"] == 2
        first, second = answer["sessions"]
        assert [first["envoy"], second["envoy"]] == ["envoy-2", "envoy-1"]
        assert (second["user"], second["state"], second["moves"]) == ("root", "idle", 0)
        assert first["client"].startswith("127.0.0.1:")
        for query in ({"envoy": "envoy-1"}, {"client": second["client"]}):
            assert [session["id"] for session in (await fleet.sessions(**query))["sessions"]] == [idle.id]
        assert (await fleet.sessions(user="nobody"))["sessions"] == []
        assert (await fleet.sessions(limit=1))["total"] == 2
        shown = await run_tidevoy(url, "sessions", "--json")
        assert [session["id"] for session in json.loads(shown.stdout)["sessions"]] == [busy.id, idle.id]
        # An idle session gets an error, a busy one just loses its connection.
        assert (await run_tidevoy(url, "kill", str(idle.id))).exit_code == 0
        assert error_code((await idle.client.read_packet())[1]) == 1053
        assert (await run_tidevoy(url, "kill", str(busy.id), "--envoy", "envoy-1")).exit_code == 1
        assert (await run_tidevoy(url, "kill", str(busy.id), "--envoy", "envoy-2")).exit_code == 0
        await busy.wait_ended()
        unknown = await run_tidevoy(url, "kill", str(idle.id))
        assert (unknown.exit_code, "no session has the id" in unknown.stderr) == (1, True)
        subjects = [event["subject"] for event in await get_events(fleet.stack, "audit.end_session")]
        assert subjects[:1] == [str(idle.id)]


async def test_kill_of_an_ambiguous_id_is_refused(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    """A node greets a client with the id of a session that has moved, as a node does that reuses its ids."""
    async with run_fleet(tmp_path, mariadb, signing) as fleet:
        victim = await fleet.open_victim(0)
        moved = await fleet.move(victim)
        killer = await fleet.connect(1)

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(mysql_packet(build_greeting("8.0.11-TiDB-v8.5.3", victim.id, new_salt())))
            await reader.read()

        async with run_fake_server(greet) as node:
            await add_favored_node(fleet.stack, node.endpoint)
            async with AsyncExitStack() as greeted:
                await connect_to_greeting(greeted, fleet.ports[1], victim.id)
                response = await killer.query(f"KILL {victim.id}")
                assert error_code(response) == 1105
                text = response.decode(errors="replace")
                assert f"the id {victim.id} means 2 sessions" in text
                assert f"connection {moved['node_id']} of" in text
                assert f"connection {victim.id} of {node.endpoint}" in text
                refused = await run_tidevoy(str(fleet.stack.api.base_url), "kill", str(victim.id))
                assert (refused.exit_code, "means 2 sessions" in refused.stderr) == (1, True)
            # The id at the present node is not ambiguous.
            session = await fleet.session(victim.id)
            assert session is not None
            assert error_code(await killer.query(f"KILL {session['node_id']}")) == 0
            await victim.wait_ended()


async def add_favored_node(stack: LocalCluster, address: str) -> None:
    """Add a node to which new clients go."""
    node = {"address": address, "weight": 10_000}
    (await stack.api.post("/v1/nodes", json=node)).raise_for_status()

    async def is_active() -> bool:
        return (await stack.states()).get(address) == "active"

    await wait_until(is_active, 30)


async def connect_to_greeting(exit_stack: AsyncExitStack, port: int, id_: int) -> None:
    """Connect until a client is greeted with this connection id, and stay connected."""

    async def is_greeted() -> bool:
        client = await exit_stack.enter_async_context(counting_client(port))
        return parse_greeting((await client.read_packet())[1]).connection_id == id_

    await wait_until(is_greeted, 30)


async def test_kill_without_a_control_plane_is_refused(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing) as fleet:
        victim = await fleet.open_victim(0)
        killer = await fleet.connect(1)
        await fleet.stack.control_plane.kill()
        response = await killer.query(f"KILL {victim.id}")
        assert error_code(response) == 1105
        assert b"no control plane has answered" in response
        # No other statement is affected.
        for client in (victim.client, killer):
            assert error_code(await client.query("do 1")) == 0
        await fleet.stack.control_plane.launch()
        await wait_until(lambda: sends_mysql_greeting(fleet.ports[1]), 30)

        async def passes() -> bool:
            return error_code(await killer.query(f"KILL {victim.id}")) == 0

        await wait_until(passes, 30)
        await victim.wait_ended()
