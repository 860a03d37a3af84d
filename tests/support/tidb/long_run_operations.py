"""The operations of a long run: one after the other, in an order that a seed determines."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from controlplane.aio import wait_at_most
from controlplane.etcd.client import EtcdClient
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from tests.support.e2e.cluster import reload_settings
from tests.support.tidb.long_run import Load, burst
from tests.support.tidb.node_operations import drain, undrain, wait_for_state

BURST_SESSIONS = 30
_MAX_PAUSE_SECONDS = 25.0
"""Average pause between two operations, for about a hundred operations in an hour."""
_TIMEOUT_SECONDS = 60.0
_CONTROL_PLANE_RESTART = "restart of the control plane"
_MAX_CONTROL_PLANE_RESTART_INTERVAL = 20
"""Number of operations between two restarts of the control plane."""


@dataclass(frozen=True)
class FinishedOperation:
    """An operation and when it ran, in seconds since the start of the run."""

    name: str
    started_at: float
    ended_at: float


class Operations:
    """Runs operations. `current` is the name of the operation that runs now; empty in a pause.

    `removed_addresses` are those of the servers that were added and removed.

    The control plane restarts at least once, and otherwise only in the first half of the run. Its growth is
    measured in the second half.
    """

    def __init__(self, stack: LocalCluster, load: Load, seed: int, seconds: float) -> None:
        self.current = ""
        self.finished: list[FinishedOperation] = []
        self.removed_addresses: list[str] = []
        self._stack, self._load, self._seconds = stack, load, seconds
        self._random = Random(seed)
        self._pause_seconds = min(_MAX_PAUSE_SECONDS, seconds / 60)
        self._reloads = count()
        self._in_rounds: dict[str, Callable[[], Awaitable[None]]] = {
            "restart after a drain": self._restart_after_drain,
            "restart without a drain": self._restart_without_drain,
            "drain and undrain": self._drain_and_undrain,
            "burst of sessions": self._burst,
            "reload": self._reload,
            "add and remove a server": self._add_and_remove_server,
        }
        self._started_at = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._started_at

    @property
    def missing(self) -> set[str]:
        """The names of operations that have not run yet."""
        return {*self._in_rounds, _CONTROL_PLANE_RESTART} - {operation.name for operation in self.finished}

    async def run(self) -> None:
        """Run operations until the end of the run, and each at least once. A failed one raises its error."""
        for name, operation in self._schedule():
            started_at, self.current = self.elapsed, name
            try:
                await operation()
            finally:
                self.current = ""
            self.finished.append(FinishedOperation(name, started_at, self.elapsed))
            pause = self._random.uniform(0.5, 1.5) * self._pause_seconds
            await wait_at_most(self._load.stopping, pause)
            if self.elapsed >= self._seconds and not self.missing:
                return

    def _schedule(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Yield rounds of all operations in a random order, and restarts of the control plane."""
        # In a short run, the restart comes after the first operations.
        interval = min(_MAX_CONTROL_PLANE_RESTART_INTERVAL, max(2, round(self._seconds / 60)))
        number = 0
        while True:
            for name, operation in self._random.sample([*self._in_rounds.items()], len(self._in_rounds)):
                yield name, operation
                number += 1
                if number % interval == 0 and (number == interval or self.elapsed < self._seconds / 2):
                    yield _CONTROL_PLANE_RESTART, self._restart_control_plane

    def _random_node(self) -> Tidb:
        return self._random.choice(self._stack.tidb)

    async def _restart_after_drain(self) -> None:
        node = self._random_node()
        await drain(self._stack, node)
        assert await node.terminate() == 0
        await node.launch()
        await undrain(self._stack, node)

    async def _restart_without_drain(self) -> None:
        node = self._random_node()
        assert await node.terminate() == 0
        await node.launch()
        await wait_for_state(self._stack, node, "active")

    async def _drain_and_undrain(self) -> None:
        node = self._random_node()
        await drain(self._stack, node)
        await undrain(self._stack, node)

    async def _burst(self) -> None:
        """Open sessions, and end those of the fullest server first, so that others migrate to it."""
        async with burst(self._stack.sql_port, BURST_SESSIONS) as clients:
            by_port: dict[bytes | None, list[int]] = defaultdict(list)
            for number, client in clients.items():
                (port,) = await client.query_row("select @@port")
                by_port[port].append(number)
            for number in max(by_port.values(), key=len):
                await clients.pop(number).quit()
            await wait_at_most(self._load.stopping, self._pause_seconds)

    async def _reload(self) -> None:
        """Change two settings: one of the control plane, and one of which Envoy gets the new value."""
        odd = next(self._reloads) % 2
        sql = {**self._stack.control_plane.settings["sql"], "login_timeout": 9.0 if odd else 7.0}
        versions = {envoy["published_version"] for envoy in await self._envoys()}
        response = await reload_settings(self._stack, sql=sql, rebalance={"threshold": 0.05 if odd else 0.06})
        assert {"sql.login_timeout", "rebalance.threshold"} <= set(response["applied"]), response
        await self._wait_until_envoy_is_up_to_date(versions)

    async def _restart_control_plane(self) -> None:
        await self._stack.control_plane.restart()
        await self._wait_until_envoy_is_up_to_date()
        await self._stack.wait_until(
            lambda: self._stack.is_in_service(len(self._stack.tidb)), "all nodes in service"
        )

    async def _add_and_remove_server(self) -> None:
        """Add a server at a new address, and remove it as an operator does who deletes its entry in PD."""
        stack = self._stack
        node = stack.cluster.new_node()

        async def has_session() -> bool:
            return bool((await stack.nodes())[node.address]["sessions"])

        async def is_removed() -> bool:
            return node.address not in await stack.nodes()

        try:
            await node.launch()
            await wait_for_state(stack, node, "active")
            async with burst(stack.sql_port, BURST_SESSIONS):
                await stack.wait_until(has_session, f"a session on {node.address}", _TIMEOUT_SECONDS)
                (await stack.api.delete(f"/v1/nodes/{node.address}")).raise_for_status()
                await stack.wait_until(is_removed, f"the removal of {node.address}", _TIMEOUT_SECONDS)
            assert await node.terminate() == 0
            assert node.violations() == []
        finally:
            if node.is_running:
                await node.kill()
            stack.tidb.remove(node)
            # Without its file, the next server gets other ports.
            (node.directory / f"{node.name}.ports").unlink(missing_ok=True)
            for port in node.listen_ports():
                stack.cluster.ports.release(port)
            async with EtcdClient([stack.cluster.pd_url]) as pd:
                await pd.delete(f"/topology/tidb/{node.address}/", prefix=True)
        self.removed_addresses.append(node.address)

    async def _envoys(self) -> list[dict[str, Any]]:
        envoys: list[dict[str, Any]] = (
            (await self._stack.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        )
        return envoys

    async def _wait_until_envoy_is_up_to_date(self, older_versions: Collection[str] = ()) -> None:
        """Wait until an Envoy has acknowledged the published version, which is none of `older_versions`."""

        async def is_up_to_date() -> bool:
            # A restarted control plane knows no Envoy until it connects.
            return any(
                envoy["connected_since"]
                and envoy["acked_version"] == envoy["published_version"]
                and envoy["acked_version"] not in older_versions
                for envoy in await self._envoys()
            )

        await self._stack.wait_until(is_up_to_date, "an Envoy with the published configuration")
