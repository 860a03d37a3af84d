"""KILL by the connection id that a client got in its handshake, on real servers, through two Envoys.

With TIDEVOY_SOAK=1, Ctrl-C is pressed 1,000 times instead of 40, each before, after and during moves, and 500
sessions are killed instead of 60.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_sim.greeting import parse_greeting
from tests.support.e2e.cluster import run_another_envoy
from tests.support.load.client_packets import query
from tests.support.module.bootstrap import require_module
from tests.support.soak import SOAK
from tests.support.tidb.ctrl_c import CtrlCClients, QueryKillLog, RunningStatements
from tests.support.tidb.kill_victims import WatchedSession
from tests.support.tidb.node_operations import start_drain
from tests.support.tidb.sessions import (
    Connection,
    close_if_open,
    connect,
    connect_directly,
    query_rows,
    session_port,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

PRESSES = 1000 if SOAK else 40
TERMINALS = 20 if SOAK else 8
SESSIONS = 500 if SOAK else 60
BYSTANDERS = 20
_SETTINGS = {"rebalance": {"enabled": False}}
_SIGNIFICANCE = 0.001
_MAX_DRAIN_SECONDS = 0.4
_MAX_CONNECTIONS = 50
_END_SECONDS = 0.5
"""Upper bound for the end of a killed session; it takes milliseconds."""
_ACCESS_DENIED = {1094, 1095, 1227}
pytestmark = pytest.mark.timeout(900 if SOAK else 180)


@dataclass(eq=False)
class ClientSession(WatchedSession):
    id: int
    """Connection id of the handshake."""

    async def ends(self) -> bool:
        """Return whether the session ends soon."""
        assert self.end is not None
        ended, _ = await asyncio.wait({self.end}, timeout=_END_SECONDS)
        return bool(ended)


class Fleet:
    """Real servers behind two Envoys."""

    def __init__(self, stack: LocalCluster, other_port: int, exit_stack: AsyncExitStack) -> None:
        self.stack, self.other_port = stack, other_port
        self._exit_stack = exit_stack

    @property
    def nodes(self) -> Sequence[Tidb]:
        return self.stack.tidb

    async def sessions(self) -> list[dict[str, Any]]:
        """Return all live sessions. Both Envoys must have answered."""
        response = await self.stack.api.get("/v1/sessions", params={"limit": 10_000})
        answer: dict[str, Any] = response.raise_for_status().json()
        assert answer["incomplete"] == []
        sessions: list[dict[str, Any]] = answer["sessions"]
        return sessions

    async def open_sessions(self, port: int, count: int) -> list[ClientSession]:
        return [await self._exit_stack.enter_async_context(open_session(port)) for _ in range(count)]

    def connect(self, port: int, **options: Any) -> Connection:
        connection = connect(port, **options)
        self._exit_stack.callback(close_if_open, connection)
        return connection

    async def undrain(self, node: Tidb) -> None:
        (await self.stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()

    async def _is_drained(self, node: Tidb) -> bool:
        return (await self.stack.states()).get(node.address) == "drained"

    async def move_all(self, count: int) -> None:
        """Move all sessions to the last node, and then away from it. `count` sessions must have moved."""
        *first, last = self.nodes
        for nodes in (first, [last]):
            for node in nodes:
                await start_drain(self.stack, node)
            addresses = {node.address for node in nodes}

            async def are_empty(addresses: set[str] = addresses) -> bool:
                return all(session["node"] not in addresses for session in await self.sessions())

            await wait_until(are_empty, 60)
            for node in nodes:
                await self.undrain(node)
        assert sum(session["moves"] > 0 for session in await self.sessions()) == count

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Move sessions back and forth during the block."""

        async def move() -> None:
            while True:
                for node in self.nodes:
                    await start_drain(self.stack, node)
                    # Sessions that a KILL has found stay for 3 s.
                    with suppress(TimeoutError):
                        await wait_until(partial(self._is_drained, node), _MAX_DRAIN_SECONDS)
                    await self.undrain(node)

        task = asyncio.create_task(move())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for node in self.nodes:
                await self.undrain(node)


@asynccontextmanager
async def open_session(port: int) -> AsyncIterator[ClientSession]:
    """Open a session and watch it during the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = RawClient(reader, writer)
    try:
        _, greeting = await client.read_packet()
        assert (await client.send_login())[0] == 0
        # KILL of a session that has run nothing fails in TiDB v8.5.3: "invalid memory address" (1105).
        assert (await client.query("do 1"))[0] == 0
        session = ClientSession(client, parse_greeting(greeting).connection_id)
        session.start_watching()
        try:
            yield session
        finally:
            await session.stop_watching()
    finally:
        writer.transport.abort()


@asynccontextmanager
async def run_fleet(directory: Path, cluster: TidbCluster) -> AsyncIterator[Fleet]:
    start = LocalCluster.start(directory, cluster=cluster, settings=_SETTINGS)
    async with start as stack, AsyncExitStack() as exit_stack:
        another = run_another_envoy(stack, "envoy-2", module=require_module())
        port = await exit_stack.enter_async_context(another)
        fleet = Fleet(stack, port, exit_stack)

        async def is_complete() -> bool:
            response = await stack.api.get("/v1/sessions")
            return not response.raise_for_status().json()["incomplete"]

        await wait_until(is_complete, 15)
        yield fleet
        assert stack.bugs() == []


@pytest.mark.parametrize("moves", ["before", "after", "during"])
async def test_ctrl_c_stops_the_statement(tmp_path: Path, cluster: TidbCluster, moves: str) -> None:
    """Half of the clients are behind each Envoy. As many others are connected to the servers directly.

    Until v8.5.3, KILL QUERY ends a session that waits for its next command (TiDB issue 65447): `killQuery` in
    pkg/server/server.go first ends the statement, and then lets the connection's read time out. If the
    session waits again in between, TiDB ends it. So TiDB must have logged the end of each lost session, and
    Tidevoy must not lose more of them than clients lose without it.
    """
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(run_fleet(tmp_path, cluster))
        running = await stack.enter_async_context(RunningStatements.watch(fleet.nodes))
        log = await stack.enter_async_context(QueryKillLog.read(fleet.nodes))
        clients = CtrlCClients("through Tidevoy", running, stack)
        await clients.open([fleet.stack.sql_port, fleet.other_port], TERMINALS)
        direct_clients = CtrlCClients("direct", running, stack)
        await direct_clients.open([node.port for node in fleet.nodes], TERMINALS)
        if moves == "after":
            await fleet.move_all(TERMINALS)
        rounds = PRESSES // TERMINALS
        # A session that a KILL has found does not move for 3 s.
        pause = 6.0 if moves == "during" else 0.5
        async with fleet.moving() if moves == "during" else nullcontext():
            await asyncio.gather(clients.press(rounds, pause), direct_clients.press(rounds, pause))
            moved = sum(session["moves"] for session in await fleet.sessions())
        killed, timed_out = log.killed(), log.timed_out()
    print(f"Ctrl-C {moves} moves ({moved}), {time.monotonic() - started:.0f} s:")
    print(f"  {clients.describe()}\n  {direct_clients.describe()}")
    assert len(killed) == len(clients.seconds) + len(direct_clients.seconds) == 2 * PRESSES
    assert moves == "before" or moved >= TERMINALS // 2
    assert set(timed_out) <= set(killed)
    assert len(timed_out) == clients.lost + direct_clients.lost
    assert chance_of_so_many(clients.lost, direct_clients.lost) > _SIGNIFICANCE


def chance_of_so_many(lost: int, lost_directly: int) -> float:
    """Return the chance of at least `lost` of all these losses, if each is equally likely in both groups."""
    total = lost + lost_directly
    combinations = sum(math.comb(total, number) for number in range(lost, total + 1))
    return float(combinations / 2**total)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_kill_by_first_id_ends_moved_sessions(tmp_path: Path, cluster: TidbCluster, busy: bool) -> None:
    started = time.monotonic()
    async with run_fleet(tmp_path, cluster) as fleet:
        victims = await fleet.open_sessions(fleet.stack.sql_port, SESSIONS)
        bystanders = await fleet.open_sessions(fleet.stack.sql_port, BYSTANDERS)
        await fleet.move_all(len(victims) + len(bystanders))
        if busy:
            for victim in victims:
                victim.client.writer.write(query("select sleep(100)"))
        seconds = await kill_all(fleet, victims)
        assert [b.id for b in bystanders if b.has_ended] == []
    report("moved and busy" if busy else "moved", seconds, started)


async def test_kill_by_first_id_ends_moving_sessions(tmp_path: Path, cluster: TidbCluster) -> None:
    started = time.monotonic()
    async with run_fleet(tmp_path, cluster) as fleet:
        victims = await fleet.open_sessions(fleet.stack.sql_port, SESSIONS)
        bystanders = await fleet.open_sessions(fleet.stack.sql_port, BYSTANDERS)
        async with fleet.moving():
            seconds = await kill_all(fleet, victims)
        assert [b.id for b in bystanders if b.has_ended] == []
    report("moving", seconds, started)


async def kill_all(fleet: Fleet, victims: Sequence[ClientSession]) -> list[float]:
    """KILL each session once by its first id, through the other Envoy; return how long each KILL took."""
    killer = fleet.connect(fleet.other_port)
    seconds = []
    for victim in victims:
        before = time.monotonic()
        await asyncio.to_thread(query_rows, killer, f"kill {victim.id}")
        seconds.append(time.monotonic() - before)
    survivors = victims

    def all_have_ended() -> bool:
        nonlocal survivors
        survivors = [victim for victim in victims if not victim.has_ended]
        return not survivors

    try:
        await wait_until(all_have_ended, 5)
    except TimeoutError:
        pytest.fail(f"{len(survivors)} of {len(victims)} sessions survived: {[v.id for v in survivors][:10]}")
    return seconds


def report(what: str, seconds: list[float], started: float) -> None:
    seconds.sort()
    print(
        f"KILL by first id ended {len(seconds)} of {len(seconds)} sessions ({what}); a KILL took"
        f" {seconds[len(seconds) // 2] * 1000:.1f} ms (median), {seconds[-1] * 1000:.0f} ms (longest);"
        f" {time.monotonic() - started:.0f} s"
    )


@pytest.mark.parametrize("is_same_node", [True, False], ids=["same node", "other node"])
async def test_privilege_is_that_of_a_direct_kill(
    tmp_path: Path, cluster: TidbCluster, is_same_node: bool
) -> None:
    """TiDB checks the privilege only if it knows the session: if KILL runs on the node of the session.

    See `KillStmt` in pkg/planner/core/planbuilder.go: KILL of a session on another node needs no privilege.
    """
    with connect_directly(cluster.tidb[0]) as admin:
        for statement in ("drop user if exists weak", "create user weak"):
            query_rows(admin, statement)
    direct = await kill_directly(cluster.tidb[0], cluster.tidb[0 if is_same_node else 1])
    async with run_fleet(tmp_path, cluster) as fleet:
        (victim,) = await fleet.open_sessions(fleet.stack.sql_port, 1)
        weak_victim = fleet.connect(fleet.stack.sql_port, user="weak")
        await fleet.move_all(2)
        (node,) = [session["node"] for session in await fleet.sessions() if session["id"] == victim.id]
        weak = connect_to_node(fleet, node, is_same_node=is_same_node)
        error = await asyncio.to_thread(error_of_kill, weak, victim.id)
        has_ended = await victim.ends()
        where = "the same node" if is_same_node else "another node"
        print(f"a user without privileges, on {where}: error {error}, ended: {has_ended}")
        assert (error, has_ended) == direct
        assert not is_same_node or (error in _ACCESS_DENIED and not has_ended)
        # A user may end its own sessions, also by COM_PROCESS_KILL.
        weak.kill(weak_victim.thread_id())  # type: ignore[no-untyped-call]
        with pytest.raises(pymysql.err.MySQLError):
            await asyncio.to_thread(query_rows, weak_victim, "select 1")


def connect_to_node(fleet: Fleet, node: str, *, is_same_node: bool) -> Connection:
    """Open a session of the user `weak` that is on this node, or is not."""
    for _ in range(_MAX_CONNECTIONS):
        connection = fleet.connect(fleet.other_port, user="weak")
        if (f"127.0.0.1:{session_port(connection)}" == node) is is_same_node:
            return connection
    pytest.fail(
        f"none of {_MAX_CONNECTIONS} sessions is on {'' if is_same_node else 'a node other than '}{node}"
    )


async def kill_directly(victims_node: Tidb, killers_node: Tidb) -> tuple[int, bool]:
    """KILL a session of root as a user without privileges, past Envoy. Return the error, and if it ends."""
    async with open_session(victims_node.port) as victim:
        with connect_directly(killers_node, user="weak") as weak:
            return error_of_kill(weak, victim.id), await victim.ends()


def error_of_kill(killer: Connection, id_: int) -> int:
    """Run KILL; return the code of its error, 0 without one."""
    try:
        query_rows(killer, f"kill {id_}")
    except pymysql.err.MySQLError as error:
        return int(error.args[0])
    return 0
