"""Sessions through an Envoy that reads its nodes from a file, and KILL by the number in process lists."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from sandbox.tidb import Tidb
from sandbox.tidb_sim.packets import Command, frames
from tests.awaiting import until
from tests.module_bootstrap import Host, Parts, tell
from tests.module_rig import Envoy, denies, envoy
from tests.peers import Peer, listening
from tests.tidb.sessions import Connection, direct, rows
from tests.tidb_sim_rig import Raw

AT_ONCE = 3.0
"""Seconds in which a session that was killed is gone; it takes milliseconds."""
BUSY = b"select sleep(100)"


@dataclass(eq=False)
class Victim:
    """One session. `name` is its session alias, which the process list shows."""

    name: str
    client: Raw
    kills: list[set[tuple[int, int]]] = field(default_factory=list)
    """By which it was killed each time: ports of nodes, and connection ids."""
    end: asyncio.Task[bytes] | None = None

    def watch(self) -> None:
        """From now on its end is awaited."""
        self.end = asyncio.create_task(_end_of(self.client))

    async def idle(self) -> None:
        """It is asked nothing, and its end is awaited no more."""
        assert self.end is not None
        self.end.cancel()
        await asyncio.gather(self.end, return_exceptions=True)

    @property
    def is_gone(self) -> bool:
        return self.end is not None and self.end.done()


async def _end_of(client: Raw) -> bytes:
    try:
        return await client.reader.read()
    except ConnectionResetError:
        return b""


class Arena:
    """An Envoy in front of real nodes, and its sessions. `denying`: one more node, which lets nobody in."""

    def __init__(self, proxy: Envoy, endpoints: Path, nodes: Sequence[Tidb], denying: Peer) -> None:
        self.proxy, self.nodes = proxy, nodes
        self._endpoints, self._denying = endpoints, denying
        self._admins: dict[int, Connection] = {}
        self.victims: list[Victim] = []

    def tell(self, *draining: Tidb, only: Sequence[Tidb] | None = None, denying: bool = False) -> None:
        """Which nodes there are, and which of them sessions are to leave."""
        shown = self.nodes if only is None else only
        hosts = [Host(node.address, state="draining" if node in draining else "active") for node in shown]
        tell(self._endpoints, [*hosts, *([Host(self._denying.endpoint, "denying")] if denying else [])])

    async def come(self, count: int) -> list[Victim]:
        """So many sessions more, which run nothing."""
        new = [await self._one(f"v{len(self.victims) + number}") for number in range(count)]
        self.victims += new
        return new

    async def _one(self, name: str) -> Victim:
        client = await self.proxy.client()
        assert (await client.login())[0] == 0
        await query(client, f"set @@tidb_session_alias = '{name}', @mine = '{name}'")
        victim = Victim(name, client)
        victim.watch()
        return victim

    def admin(self, node: Tidb) -> Connection:
        """A connection to it, past Envoy."""
        if node.port not in self._admins:
            self._admins[node.port] = direct(node)
        return self._admins[node.port]

    def leave(self, node: Tidb) -> None:
        """No connection to it is ours any more."""
        if admin := self._admins.pop(node.port, None):
            admin.close()

    def listed(self, *nodes: Tidb) -> dict[str, list[tuple[Tidb, int]]]:
        """What the process lists show at this moment: node and number, by the alias."""
        found: dict[str, list[tuple[Tidb, int]]] = {}
        for node in nodes or self.nodes:
            asked = "select session_alias, id from information_schema.processlist where session_alias <> ''"
            for alias, number in rows(self.admin(node), asked):
                found.setdefault(str(alias), []).append((node, int(number)))
        return found

    def kill(self, victim: Victim, shown: Sequence[tuple[Tidb, int]]) -> None:
        """By each number that is shown."""
        victim.kills.append({(node.port, number) for node, number in shown})
        for node, number in shown:
            rows(self.admin(node), f"kill {number}")

    async def gone(self, victims: Sequence[Victim]) -> None:
        await until_all(lambda victim: victim.is_gone, victims)

    async def still(self, victims: Sequence[Victim], node: Tidb | None = None) -> None:
        """All are there with what they had, on that node if one is named. Their states are not known then."""
        for victim in victims:
            assert not victim.is_gone, f"{victim.name} has ended"
            await victim.idle()
            mine, port = await row(victim.client, "select @mine, @@port")
            assert mine == victim.name
            assert node is None or port == str(node.port)
            victim.watch()

    async def stayed(self, count: int) -> None:
        """Returns when so many moves have failed since the target let nobody in."""

        async def is_counted() -> bool:
            series = await self.proxy.metrics()
            failed = [
                n for (name, labels), n in series.items() if name == "migrations" and "denied" in labels
            ]
            return sum(failed) >= count

        await until(is_counted, 60.0)

    async def are_on(self, node: Tidb, victims: Sequence[Victim]) -> None:
        """Returns when they have moved there."""
        names = {victim.name for victim in victims}

        def are_there() -> bool:
            shown = self.listed(*(one for one in self.nodes if one.running))
            return all([one for one, _ in shown.get(name, [])] == [node] for name in names)

        await until(are_there, 60.0)


async def until_all(holds: Callable[[Victim], bool], victims: Sequence[Victim]) -> None:
    """Fails with the names of those for which it does not hold in time."""
    try:
        await until(lambda: all(map(holds, victims)), AT_ONCE)
    except TimeoutError:
        left = [(victim.name, victim.kills) for victim in victims if not holds(victim)]
        raise AssertionError(f"{len(left)} of {len(victims)} are left: {left[:5]}") from None


async def query(client: Raw, statement: str) -> None:
    """A statement that gives no rows."""
    answer = await client.query(statement)
    assert answer[0] == 0, answer


async def row(client: Raw, statement: str) -> tuple[str | None, ...]:
    """The only row of a statement."""
    (only,) = await client.rows(statement)
    return only


def run(victims: Sequence[Victim]) -> None:
    """They are busy from now on."""
    for victim in victims:
        victim.client.writer.write(frames(0, [bytes((Command.QUERY,)) + BUSY]))


async def are_busy(arena: Arena, victims: Sequence[Victim]) -> None:
    """Returns when the nodes run their statements."""
    asked = f"select count(*) from information_schema.processlist where info = '{BUSY.decode()}'"

    def run_all() -> bool:
        return sum(int(rows(arena.admin(node), asked)[0][0]) for node in arena.nodes) == len(victims)

    await until(run_all)


async def log_kills(node: Tidb) -> None:
    """From now on it logs which idle connections a KILL has ended (pkg/server/conn.go)."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        (await client.post(f"{node.status}/settings", data={"log_level": "info"})).raise_for_status()


def killed_by_log(node: Tidb, log: Path) -> set[tuple[int, int]]:
    """What it has logged of that."""
    lines = (line for line in log.read_text(errors="replace").splitlines() if "killed connection" in line)
    return {(node.port, int(found[1])) for line in lines if (found := re.search(r"\[conn=(\d+)\]", line))}


@asynccontextmanager
async def arena(directory: Path, nodes: Sequence[Tidb]) -> AsyncIterator[Arena]:
    """Sessions come to the first node only, until it is told otherwise."""
    endpoints = directory / "endpoints.json"
    async with listening(denies) as denying:
        hosts = [Host(node.address, state="active" if node is nodes[0] else "draining") for node in nodes]
        async with envoy(directory, hosts, Parts(endpoints=endpoints), workers=2) as proxy:
            one = Arena(proxy, endpoints, nodes, denying)
            try:
                yield one
            finally:
                for victim in one.victims:
                    await victim.idle()
                for node in nodes:
                    one.leave(node)


def paced(began: float, at: float) -> float:
    """Seconds until then."""
    return max(0.0, began + at - time.monotonic())
