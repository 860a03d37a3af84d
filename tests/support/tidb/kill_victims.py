"""Sessions through an Envoy, and KILL of the connection ids in the nodes' process lists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.server import http_client
from sandbox.tidb import Tidb
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.load.client_packets import query
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import ModuleEnvoy, deny_logins, run_envoy
from tests.support.tidb.sessions import Connection, connect_directly, query_rows
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

_END_TIMEOUT_SECONDS = 3.0
"""Upper bound for the end of a killed session; it takes milliseconds."""
_MIGRATION_TIMEOUT_SECONDS = 60.0
_STATEMENT = "select sleep(100)"
_ALIAS_QUERY = "select session_alias, id from information_schema.processlist where session_alias <> ''"

KillTarget = tuple[Tidb, int]
"""Node and connection id."""


@dataclass(eq=False)
class WatchedSession:
    """An idle session. Its end is seen at once."""

    client: RawClient
    end: asyncio.Task[None] | None = field(default=None, init=False)

    def start_watching(self) -> None:
        """Start waiting for the end of the session."""
        self.end = asyncio.create_task(_read_until_end(self.client))

    async def stop_watching(self) -> None:
        """Stop reading, so that the session can be queried."""
        assert self.end is not None
        self.end.cancel()
        await asyncio.gather(self.end, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        return self.end is not None and self.end.done()


@dataclass(eq=False)
class KilledSession(WatchedSession):
    """One session. `name` is its session alias, which the process list shows."""

    name: str
    kills: list[set[tuple[int, int]]] = field(default_factory=list)
    """SQL ports and connection ids of the KILL statements, per attempt."""


async def _read_until_end(client: RawClient) -> None:
    with suppress(ConnectionResetError):
        await client.reader.read()


class KillScenario:
    """An Envoy in front of real nodes, and its sessions.

    `denying`: one more node, which denies all logins.
    """

    def __init__(
        self, proxy: ModuleEnvoy, endpoints: Path, nodes: Sequence[Tidb], denying: FakeServer
    ) -> None:
        self.proxy, self.nodes = proxy, nodes
        self._endpoints, self._denying = endpoints, denying
        self._admins: dict[int, Connection] = {}
        self.victims: list[KilledSession] = []

    def publish_nodes(
        self, *draining: Tidb, only: Sequence[Tidb] | None = None, denying: bool = False
    ) -> None:
        """Publish the nodes to Envoy. Sessions must leave the nodes that are draining."""
        nodes = self.nodes if only is None else only
        hosts = [Host(node.address, state="draining" if node in draining else "active") for node in nodes]
        publish_nodes(
            self._endpoints, [*hosts, *([Host(self._denying.endpoint, "denying")] if denying else [])]
        )

    async def wait_until_known(self) -> None:
        """Wait until Envoy knows all nodes, and no longer the denying node."""

        async def is_applied() -> bool:
            page = (await self.proxy.get("/clusters")).text
            return all(node.address in page for node in self.nodes) and self._denying.endpoint not in page

        await wait_until(is_applied)

    async def connect(self, count: int) -> list[KilledSession]:
        """Open this many idle sessions."""
        added = [await self._open_session(f"v{len(self.victims) + number}") for number in range(count)]
        self.victims += added
        return added

    async def _open_session(self, name: str) -> KilledSession:
        client = await self.proxy.connect()
        assert (await client.login())[0] == 0
        response = await client.query(f"set @@tidb_session_alias = '{name}', @mine = '{name}'")
        assert response[0] == 0, response
        victim = KilledSession(client, name)
        victim.start_watching()
        return victim

    async def run_statements(self, victims: Sequence[KilledSession]) -> None:
        """Send a long statement in each session. Return when the nodes execute all of these statements."""
        for victim in victims:
            victim.client.writer.write(query(_STATEMENT))
        count = f"select count(*) from information_schema.processlist where info = '{_STATEMENT}'"

        def is_busy() -> bool:
            return sum(int(query_rows(self.admin(node), count)[0][0]) for node in self.nodes) == len(victims)

        await wait_until(is_busy)

    def admin(self, node: Tidb) -> Connection:
        """Return a direct connection to a node."""
        if node.port not in self._admins:
            self._admins[node.port] = connect_directly(node)
        return self._admins[node.port]

    def close_admin(self, node: Tidb) -> None:
        if admin := self._admins.pop(node.port, None):
            admin.close()

    def listed(self, *nodes: Tidb) -> dict[str, list[KillTarget]]:
        """Return the sessions in the process lists now, by session alias."""
        targets: dict[str, list[KillTarget]] = {}
        for node in nodes or self.nodes:
            for alias, connection_id in query_rows(self.admin(node), _ALIAS_QUERY):
                targets.setdefault(str(alias), []).append((node, int(connection_id)))
        return targets

    def kill(self, victim: KilledSession, targets: Sequence[KillTarget]) -> None:
        """Run KILL for each of these connection ids."""
        victim.kills.append({(node.port, connection_id) for node, connection_id in targets})
        for node, connection_id in targets:
            query_rows(self.admin(node), f"kill {connection_id}")

    async def wait_until_ended(self, victims: Sequence[KilledSession]) -> None:
        """Wait until the sessions have ended. Raises AssertionError with the names of remaining sessions."""
        try:
            await wait_until(lambda: all(victim.has_ended for victim in victims), _END_TIMEOUT_SECONDS)
        except TimeoutError:
            remaining = [(victim.name, victim.kills) for victim in victims if not victim.has_ended]
            raise AssertionError(
                f"{len(remaining)} of {len(victims)} are still open: {remaining[:5]}"
            ) from None

    async def check_alive(self, victims: Sequence[KilledSession], node: Tidb) -> None:
        """Check that all sessions are on this node and have their variable.

        The check runs a query, which invalidates states that Envoy has saved.
        """
        for victim in victims:
            assert not victim.has_ended, f"{victim.name} has ended"
            await victim.stop_watching()
            assert await victim.client.rows("select @mine, @@port") == [(victim.name, str(node.port))]
            victim.start_watching()

    async def wait_until_denied(self, count: int) -> None:
        """Wait until this many migrations have failed because the target denied the login."""

        async def is_reached() -> bool:
            series = await self.proxy.metrics()
            denied = [
                value
                for (name, labels), value in series.items()
                if name == "migrations" and "denied" in labels
            ]
            return sum(denied) >= count

        await wait_until(is_reached, _MIGRATION_TIMEOUT_SECONDS)

    async def wait_until_on(self, node: Tidb, victims: Sequence[KilledSession]) -> None:
        """Wait until all of these sessions are on this node."""
        names = {victim.name for victim in victims}

        def have_arrived() -> bool:
            sessions = self.listed(*(other for other in self.nodes if other.is_running))
            return all([other for other, _ in sessions.get(name, [])] == [node] for name in names)

        await wait_until(have_arrived, _MIGRATION_TIMEOUT_SECONDS)


@asynccontextmanager
async def log_kills(nodes: Sequence[Tidb]) -> AsyncIterator[None]:
    """Make nodes log the idle connections that a KILL ends (pkg/server/conn.go)."""
    async with http_client() as client:

        async def set_level(level: str) -> None:
            for node in nodes:
                (
                    await client.post(f"{node.status_url}/settings", data={"log_level": level})
                ).raise_for_status()

        await set_level("info")
        try:
            yield
        finally:
            await set_level("warn")


def logged_kills(node: Tidb) -> set[tuple[int, int]]:
    """Return SQL port and connection id of each logged KILL."""
    matches = (re.search(r"\[conn=(\d+)\]", line) for line in node.log_lines_containing("killed connection"))
    return {(node.port, int(match[1])) for match in matches if match}


@asynccontextmanager
async def run_kill_scenario(directory: Path, nodes: Sequence[Tidb]) -> AsyncIterator[KillScenario]:
    """Run a scenario in which at first only the first node receives sessions."""
    endpoints = directory / "endpoints.json"
    async with run_fake_server(deny_logins) as denying:
        hosts = [Host(node.address, state="active" if node is nodes[0] else "draining") for node in nodes]
        async with run_envoy(directory, hosts, ModuleConfig(endpoints=endpoints), workers=2) as proxy:
            scenario = KillScenario(proxy, endpoints, nodes, denying)
            try:
                yield scenario
            finally:
                for victim in scenario.victims:
                    await victim.stop_watching()
                for node in nodes:
                    scenario.close_admin(node)
