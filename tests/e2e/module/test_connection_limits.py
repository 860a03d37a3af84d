"""Limits of client connections over two Envoys, and over a change of the leader."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import (
    CountingClient,
    counting_client,
    get_metrics,
    metric_key,
    reload_settings,
    wait_for_values,
)
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, run_balanced_cluster
from tests.support.e2e.replicated_cluster import run_replicated_cluster
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

LIMIT = 20
TOO_MANY_CONNECTIONS, USER_LIMIT = 1040, 1226


class LimitedCluster:
    """A cluster of two Envoys with limits, and clients of each Envoy."""

    def __init__(self, cluster: BalancedCluster, exit_stack: AsyncExitStack) -> None:
        self.stack = cluster.stack
        self._ports = cluster.ports
        self._exit_stack = exit_stack
        self.clients: list[list[CountingClient]] = [[], []]

    @property
    def count(self) -> int:
        return sum(map(len, self.clients))

    async def connect(self, envoy: int) -> int:
        """Connect a client to the first (0) or second (1) Envoy. Return the error code; 0: logged in."""
        async with AsyncExitStack() as attempt:
            client = await attempt.enter_async_context(counting_client(self._ports[envoy]))
            _, first = await client.read_packet()
            code = error_code(first) if first[0] == 0xFF else error_code(await client.send_login())
            if not code:
                self.clients[envoy].append(client)
                self._exit_stack.push_async_exit(attempt.pop_all())
            return code

    async def fill(self, envoy: int, count: int) -> None:
        """Connect clients to an Envoy until it has `count` of this test; retry refused ones."""

        async def is_full() -> bool:
            while len(self.clients[envoy]) < count and not await self.connect(envoy):
                assert self.count <= LIMIT
            return len(self.clients[envoy]) == count

        await self.stack.wait_until(is_full, f"{count} clients at Envoy {envoy + 1}", 60.0)

    async def disconnect(self, envoy: int) -> None:
        client = self.clients[envoy].pop()
        client.writer.close()
        await client.writer.wait_closed()

    async def limits(self) -> dict[str, dict[str, Any]]:
        """Return the limits by name, as REST shows them."""
        answer = await self.stack.api.get("/v1/limits")
        return {limit["name"]: limit for limit in answer.json()["limits"]}

    async def wait_reported(self, rule: str, *counts: int) -> None:
        """Wait until the control plane knows the connections of both Envoys."""

        async def is_reported() -> bool:
            envoys = (await self.limits())[rule]["envoys"]
            return [envoy["connections"] for envoy in envoys] == list(counts)

        await self.stack.wait_until(is_reported, f"{counts} connections to be reported", 30.0)


async def test_clients_of_two_envoys_reach_the_limit_and_not_more(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    settings = {"limits": {"max_connections": LIMIT}}
    async with (
        run_balanced_cluster(tmp_path, mariadb, signing, nodes=2, envoys=2, settings=settings) as balanced,
        AsyncExitStack() as exit_stack,
    ):
        cluster = LimitedCluster(balanced, exit_stack)
        await cluster.wait_reported("total", 0, 0)
        await asyncio.gather(cluster.fill(0, 2), cluster.fill(1, LIMIT - 2))
        await cluster.wait_reported("total", 2, LIMIT - 2)
        for envoy in (0, 1, 0, 1):
            assert await cluster.connect(envoy) == TOO_MANY_CONNECTIONS

        shown = (await cluster.limits())["total"]
        assert (shown["max_connections"], shown["connections"]) == (LIMIT, LIMIT)
        assert sum(envoy["quota"] for envoy in shown["envoys"]) <= LIMIT
        series = {
            metric_key("tidevoy_limit_max_connections", rule="total"): LIMIT,
            metric_key("tidevoy_limit_connections", envoy="envoy-1", rule="total"): 2,
            metric_key("tidevoy_limit_connections", envoy="envoy-2", rule="total"): LIMIT - 2,
        }
        await wait_for_values(cluster.stack, series, lambda: get_metrics(cluster.stack))
        printed = await run_tidevoy(cluster.stack.control_plane.api_url, "limits", "--json")
        assert json.loads(printed.stdout)["limits"][0]["name"] == "total"

        # Free connections are available at the other Envoy, too.
        for _ in range(5):
            await cluster.disconnect(1)
        await cluster.fill(0, 7)
        await cluster.wait_reported("total", 7, LIMIT - 7)

        # The limits stay without a control plane.
        await cluster.stack.control_plane.kill()
        for envoy in (0, 1):
            assert await cluster.connect(envoy) == TOO_MANY_CONNECTIONS
            await cluster.disconnect(envoy)
            await cluster.fill(envoy, len(cluster.clients[envoy]) + 1)
            assert await cluster.connect(envoy) == TOO_MANY_CONNECTIONS


async def test_changed_limits_of_a_user_apply_to_both_envoys_at_once(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    settings = {"limits": {"max_connections": 1000}}
    async with (
        run_balanced_cluster(tmp_path, mariadb, signing, nodes=1, envoys=2, settings=settings) as balanced,
        AsyncExitStack() as exit_stack,
    ):
        cluster = LimitedCluster(balanced, exit_stack)
        await cluster.fill(0, 3)
        await cluster.fill(1, 3)
        await cluster.wait_reported("total", 3, 3)
        rule = {"name": "roots", "user": "root", "network": "127.0.0.0/8", "max_connections": 6}
        await reload_settings(cluster.stack, limits={"rules": [rule]})
        await cluster.wait_reported("roots", 3, 3)
        for envoy in (0, 1):
            assert await cluster.connect(envoy) == USER_LIMIT
        await reload_settings(cluster.stack, limits={"rules": [rule | {"max_connections": 8}]})
        await cluster.fill(0, 5)
        await cluster.wait_reported("roots", 5, 3)
        assert await cluster.connect(0) == USER_LIMIT
        await reload_settings(cluster.stack, limits={"rules": [rule | {"max_connections": 1}]})
        await cluster.wait_reported("roots", 5, 3)
        assert await cluster.connect(1) == USER_LIMIT
        await reload_settings(cluster.stack, limits={"rules": []})
        await cluster.fill(1, 6)
        for client in (*cluster.clients[0], *cluster.clients[1]):
            assert error_code(await client.query("do 1")) == 0


async def test_limit_holds_when_another_control_plane_becomes_the_leader(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    start = run_replicated_cluster(
        tmp_path, mariadb, nodes=1, arguments=signing.arguments, settings={"limits": {"max_connections": 3}}
    )
    async with start as cluster, AsyncExitStack() as exit_stack:

        async def is_refused() -> bool:
            async with counting_client(cluster.sql_port) as client:
                return error_code((await client.read_packet())[1]) == TOO_MANY_CONNECTIONS

        async def wait_reported(connections: int) -> None:
            """Wait until all control planes know the Envoy's connections, and that its quota is the limit."""

            async def is_reported() -> bool:
                limits = [
                    (await cluster.get(plane, "/v1/limits"))["limits"][0]["envoys"]
                    for plane in cluster.running_control_planes()
                ]
                return all(
                    [(envoy["connections"], envoy["quota"]) for envoy in envoys] == [(connections, 3)]
                    for envoys in limits
                )

            await wait_until(is_reported, 30.0)

        async def logs_in() -> bool:
            client = await exit_stack.enter_async_context(counting_client(cluster.sql_port))
            return error_code(await client.log_in()) == 0

        await wait_reported(0)
        for _ in range(3):
            # The quota may just have been 0: reports have the larger one of the last two quotas.
            await wait_until(logs_in)
        assert await is_refused()
        await wait_reported(3)
        leader = await cluster.wait_for_leader()
        await leader.kill()
        await cluster.wait_for_leader(excluded_name=leader.name)
        assert await is_refused()
        await wait_reported(3)
        assert await is_refused()
