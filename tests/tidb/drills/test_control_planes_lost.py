"""All control planes are lost for an hour while TiDB servers come and go.

The control planes first run with a clock that is an hour behind. So when they come back with the right clock,
their saved plan and intents are an hour old, although the drill takes only seconds (TIDEVOY_SOAK=1: ten
minutes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest

from controlplane.xds.bootstrap import module_path
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.server import launch_all
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.background import run_in_background
from tests.support.soak import SOAK
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.logins import LoginProbe
from tests.support.tidb.node_operations import migration_counts, wait_for_state
from tests.support.tidb.sessions import (
    Connection,
    TrackedSessions,
    connect,
    query_rows,
    query_value,
    session_port,
)
from tests.support.tidb.wall_clock import WallClock
from tests.support.waiting import wait_until

OUTAGE_SECONDS = 600.0 if SOAK else 0.0
"""Minimal duration of the outage."""
CLOCK_SECONDS = 3600
"""How much older the saved state looks."""
DRAIN_DEADLINE_SECONDS = 600.0
SESSIONS = 150
"""Idle sessions."""
CLIENTS = 6
"""Sessions that run statements."""
_SAMPLE_SECONDS = 0.1
_TIMEOUT_SECONDS = 60.0


@asynccontextmanager
async def run_stack(
    directory: Path, cluster: TidbCluster, prefix: str, count: int
) -> AsyncIterator[tuple[LocalCluster, list[ControlPlaneProcess], WallClock, str]]:
    """Run one or two control planes and an Envoy. Yield them, and a bootstrap for a second Envoy.

    The clock of the control planes is `CLOCK_SECONDS` behind. Their monotonic clock is not changed.
    """
    clock = WallClock.build(directory)
    clock.set_offset(-CLOCK_SECONDS)

    class DelayedControlPlane(ControlPlaneProcess):
        extra_variables = {**ControlPlaneProcess.extra_variables, **clock.variables}  # noqa: RUF012

    def replica(name: str) -> dict[str, Any]:
        return {"enabled": count > 1, "name": name, "prefix": f"/{prefix}/"}

    settings = {
        "replicas": replica("one"),
        # With another policy, other processes on this machine might delay the sessions' move to a new node.
        "balance": {"policy": "connection", "slow_start": 5},
    }
    async with LocalCluster.start(
        directory, cluster=cluster, settings=settings, control_plane=DelayedControlPlane
    ) as stack:
        first = stack.control_plane
        second = DelayedControlPlane(
            directory,
            {
                **first.settings,
                "xds": {"listen": f"127.0.0.1:{stack.ports.allocate()}"},
                "api": {"listen": f"127.0.0.1:{stack.ports.allocate()}"},
                "state_dir": str(directory / "state-two"),
                "replicas": replica("two"),
            },
            name="control-plane-two",
        )
        planes = [first, second][:count]

        def bootstrap(envoy: str, admin_port: int) -> str:
            return render_bootstrap(
                first.parsed_settings(),
                control_planes=[plane.parsed_settings().xds.listen for plane in planes],
                node_id=envoy,
                admin=f"127.0.0.1:{admin_port}",
                module=str(module_path.find_module()),
            )

        async with AsyncExitStack() as others:
            for plane in planes[1:]:
                await others.enter_async_context(plane)
            stack.envoy.bootstrap = bootstrap("envoy-1", stack.advertised.admin)
            await stack.envoy.restart()
            nodes = len(cluster.tidb)
            await stack.wait_until(lambda: stack.is_in_service(nodes), "an Envoy that knows all", 30.0)
            yield stack, planes, clock, bootstrap("envoy-2", 0)
        assert stack.violations() == []
        assert stack.bugs() == []


def is_open(session: Connection) -> bool:
    """Return whether a session still answers."""
    try:
        return bool(query_value(session, "select 1") == 1)
    except pymysql.err.OperationalError:
        return False


def reopen(sessions: TrackedSessions, idle: list[Connection]) -> int:
    """Replace sessions that have ended, as connection pools do; return how many had ended."""
    lost = [number for number, session in enumerate(idle) if not is_open(session)]
    for number in lost:
        idle[number] = sessions.through_envoy()
    return len(lost)


def gets_new_session(stack: LocalCluster, node: Tidb) -> bool:
    with connect(stack.sql_port) as session:
        return session_port(session) == node.port


def sessions_by_port(idle: list[Connection]) -> dict[int, int]:
    ports = [session_port(session) for session in idle]
    return {port: ports.count(port) for port in ports}


async def sample_weights(stack: LocalCluster, address: str, weights: list[int]) -> None:
    """Append each weight of a node that differs from the previous one."""
    while True:
        node = (await stack.nodes()).get(address)
        if node is not None and node["published_weight"] not in (0, *weights[-1:]):
            weights.append(node["published_weight"])
        await asyncio.sleep(_SAMPLE_SECONDS)


@pytest.mark.timeout(1200 if SOAK else 180)
@pytest.mark.parametrize("count", [1, 2] if SOAK else [2])
async def test_nodes_come_and_go_while_no_control_plane_runs(
    cluster: TidbCluster, tmp_path: Path, database: str, count: int
) -> None:
    drained, stopped, killed = cluster.tidb
    async with run_stack(tmp_path, cluster, database, count) as (stack, planes, clock, other_bootstrap):
        kept = await stack.add_tidb()
        await stack.wait_until(lambda: stack.has_active_nodes(4), "four active nodes", _TIMEOUT_SECONDS)
        with closing(TrackedSessions(stack, database)) as sessions:
            pinned = sessions.on_node(drained)
            query_rows(pinned, "begin")
            body = {"deadline_seconds": DRAIN_DEADLINE_SECONDS, "on_deadline": "close"}
            (await stack.api.post(f"/v1/nodes/{drained.address}/drain", json=body)).raise_for_status()
            await wait_for_state(stack, drained, "draining")
            idle = [sessions.through_envoy() for _ in range(SESSIONS)]
            load = DrillLoad(
                stack.sql_port, database, clients=CLIENTS, statements_per_second=60, reconnect=True
            )
            async with load, LoginProbe.run(stack.sql_port) as logins:
                started_at = time.monotonic()
                for plane in planes:
                    await plane.kill()

                assert await asyncio.to_thread(reopen, sessions, idle) == 0
                await load.wait_for_statements()
                assert load.errors == []
                assert logins.errors == []
                on_stopped = (await asyncio.to_thread(sessions_by_port, idle)).get(stopped.port, 0)
                assert await stopped.terminate() == 0
                lost_by_stop = await asyncio.to_thread(reopen, sessions, idle)
                assert lost_by_stop <= on_stopped
                on_killed = (await asyncio.to_thread(sessions_by_port, idle)).get(killed.port, 0)
                await killed.kill()
                lost_by_kill = await asyncio.to_thread(reopen, sessions, idle)
                assert lost_by_kill <= on_killed
                await load.wait_for_statements()
                error_counts = len(load.errors), len(logins.errors)
                await killed.launch()
                # Envoy does not use it until its ejection is over.
                await wait_until(lambda: asyncio.to_thread(gets_new_session, stack, killed))
                new = await stack.add_tidb()
                assert session_port(pinned) == drained.port
                async with EnvoyProcess(other_bootstrap, tmp_path, name="envoy-2") as late_envoy:
                    await asyncio.sleep(max(0.0, started_at + OUTAGE_SECONDS - time.monotonic()))
                    assert not await has_sql_listener(late_envoy)
                    outage = time.monotonic() - started_at
                    before = await asyncio.to_thread(sessions_by_port, idle)
                    moved_before = sum_moved(await migration_counts(stack))

                    clock.set_offset(0)
                    await launch_all(planes)
                    returned_at, weights = time.monotonic(), list[int]()
                    async with run_in_background(sample_weights(stack, new.address, weights)):
                        await wait_for_state(stack, new, "active")
                        found = time.monotonic() - returned_at
                        await wait_for_state(stack, drained, "drained")
                        listens = partial(has_sql_listener, late_envoy)
                        await stack.wait_until(listens, "the second Envoy to serve")
                        await wait_until(lambda: has_its_share(stack, new.address), _TIMEOUT_SECONDS)
                        balanced = time.monotonic() - returned_at
            moved = sum_moved(await migration_counts(stack)) - moved_before
            after = sessions_by_port(idle)
            gained = sum(max(0, count - before.get(port, 0)) for port, count in after.items())
            with pytest.raises(pymysql.err.OperationalError, match="taken out of service") as error:
                query_value(pinned, "select 1")
            print(
                f"\ndrill control_planes_lost: {count} control planes, outage {outage:.0f} s;"
                f" {logins.successes} logins, errors {logins.errors}, longest"
                f" {logins.longest_seconds:.2f} s; idle sessions lost by the stop {lost_by_stop} of"
                f" {on_stopped}, by the kill {lost_by_kill} of {on_killed}; {load.statements} statements,"
                f" errors {load.errors}; new node active after {found:.1f} s, with its share after"
                f" {balanced:.1f} s; moved {moved}, gained {gained}, before {before}, after {after},"
                f" weights {weights}"
            )
            assert error.value.args[0] == 1053
            # The stop and the kill may each end a client's session once, and the login of that moment.
            assert (len(load.errors), len(logins.errors)) == error_counts, (
                load.errors,
                logins.errors,
                lines_about_failed_logins(stack),
            )
            assert len(load.errors) <= 2 * CLIENTS, load.errors
            assert len(logins.errors) <= 2, logins.errors
            assert logins.successes > outage
            # Rebalancing moves no session there and back. Those that run statements are not in `gained`.
            assert moved <= gained + CLIENTS
            assert after[kept.port] > SESSIONS / 4, "it gave away more than the sessions above its share"
            assert weights[0] < weights[-1] / 2
            assert stopped.address not in {
                address for address, state in (await stack.states()).items() if state == "active"
            }


async def has_sql_listener(envoy: EnvoyProcess) -> bool:
    """Return whether an Envoy listens for clients. It is live after half a minute, even if it does not."""
    return "sql::" in (await envoy.get("/listeners")).text


def sum_moved(counts: Mapping[tuple[str, str, str], int]) -> int:
    return sum(count for (_, result, _), count in counts.items() if result == "moved")


def lines_about_failed_logins(stack: LocalCluster) -> list[str]:
    """Return the lines of the Envoy's log that say why a login found no node."""
    log = stack.envoy.process.log.read_text(errors="replace")
    return [line for line in log.splitlines() if "a login found no node" in line]


async def has_its_share(stack: LocalCluster, address: str) -> bool:
    """Return whether a node has about as many sessions as the average active node."""
    nodes = (await stack.nodes()).items()
    counts = {key: node["sessions"] or 0 for key, node in nodes if node["state"] == "active"}
    return counts[address] >= 0.6 * sum(counts.values()) / len(counts)
