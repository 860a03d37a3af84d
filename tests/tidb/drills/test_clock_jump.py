"""The clock of the machine of a control plane and an Envoy jumps by 10 minutes, forward and back, under load.

The TiDB servers, PD and another control plane keep the true time. `make soak` lets the clock jump ten times.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pymysql
import pytest

from sandbox.control_plane import ControlPlaneProcess
from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.server import http_client
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.controlplane.api_server import stored_events
from tests.support.soak import SOAK
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.node_operations import migration_counts, undrain, wait_for_state
from tests.support.tidb.sessions import Connection, TrackedSessions, query_rows, query_value, session_port
from tests.support.tidb.wall_clock import WallClock
from tests.support.waiting import assert_never, wait_until

JUMP_SECONDS = 600
OFFSETS = [JUMP_SECONDS, -JUMP_SECONDS] * (5 if SOAK else 1)
"""The offsets from the true time, one after the other: from +600 to -600 it jumps by 20 minutes."""
DEADLINE_SECONDS = 6
DEADLINE_TOLERANCE_SECONDS = 5.0
"""The load and other tests delay the end of a drain."""
MAX_CONFIRMATION_SECONDS = 20.0
"""From the end of the last session until the node is `drained`. Reports that seem old would delay this."""
_DATE_TOLERANCE_SECONDS = 5.0
_IDLE_SESSIONS = 12


@dataclass
class ClockStack:
    """`stack` has the wrong clock, and leads. `follower` is a control plane with the true time."""

    stack: LocalCluster
    clock: WallClock
    follower: httpx2.AsyncClient


@pytest.fixture
async def clocked(tmp_path: Path, cluster: TidbCluster) -> AsyncIterator[ClockStack]:
    prefix = f"/{uuid.uuid4().hex}/"
    clock = WallClock.build(tmp_path)
    settings = {
        "replicas": {"enabled": True, "name": "first", "prefix": prefix},
        # Other processes on this machine must not delay the sessions' return to a node.
        "balance": {"policy": "connection"},
    }
    with Ports() as ports:
        async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
            for server in (stack.control_plane, stack.envoy):
                clock.apply_to(server)
                await server.restart()
            await stack.wait_until(lambda: stack.is_in_service(len(stack.tidb)), "active nodes", 30.0)
            second_settings = {
                **stack.control_plane.settings,
                "replicas": {"enabled": True, "name": "second", "prefix": prefix},
                "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
                "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
                "state_dir": str(tmp_path / "second-state"),
            }
            async with (
                ControlPlaneProcess(tmp_path / "second", second_settings) as second,
                http_client(second.api_url) as follower,
            ):
                await wait_until(lambda: has_all_replicas(follower))
                yield ClockStack(stack, clock, follower)
            assert stack.violations() == []
            assert stack.bugs() == []


async def replicas_of(http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = (await http.get("/v1/replicas")).raise_for_status().json()["replicas"]
    return replicas


async def has_all_replicas(http: httpx2.AsyncClient) -> bool:
    """Return whether two replicas exchange reports, and the first one leads."""
    replicas = {replica["name"]: replica for replica in await replicas_of(http)}
    return (
        len(replicas) == 2
        and replicas["first"]["is_leader"]
        and not any(r["unreachable"] for r in replicas.values())
    )


async def is_ahead(url: str, seconds: int) -> bool:
    """Return whether the clock of a server is this far ahead, by the header `Date`, which servers cache."""
    async with http_client(url) as http:
        date = parsedate_to_datetime((await http.get("/")).headers["date"])
    return abs((date - datetime.now(UTC)).total_seconds() - seconds) < _DATE_TOLERANCE_SECONDS


@dataclass
class Durations:
    """What a jump may have changed, in seconds."""

    deadline: float
    """From the start of the drain until it closed the last session."""
    confirmation: float
    """From then on until the node was `drained`."""
    rebalancing: float
    """From the end of the drain until the node had sessions again."""

    def __str__(self) -> str:
        return (
            f"the deadline of {DEADLINE_SECONDS} s passed after {self.deadline:.1f} s, drained"
            f" {self.confirmation:.1f} s later, sessions back {self.rebalancing:.1f} s after the undrain"
        )


async def jump_during_drain(
    clocked: ClockStack, node: Tidb, sessions: TrackedSessions, idle: list[Connection], offset: int
) -> Durations:
    """Set the clock while a node is drained, and return the node to service afterwards."""
    stack = clocked.stack
    in_transaction = sessions.on_node(node)
    query_rows(in_transaction, "begin")
    query_rows(in_transaction, "select * from drill_load")  # From now on, it cannot migrate.

    def is_closed() -> bool:
        try:
            return bool(query_value(in_transaction, "select 1") != 1)
        except pymysql.err.OperationalError:
            return True

    drained_at = time.monotonic()
    body = {"deadline_seconds": DEADLINE_SECONDS, "on_deadline": "close"}
    (await stack.api.post(f"/v1/nodes/{node.address}/drain", json=body)).raise_for_status()
    clocked.clock.set_offset(offset)
    for url in (stack.control_plane.api_url, stack.envoy.admin_url):
        await wait_until(partial(is_ahead, url, offset), 5.0)
    await assert_never(is_closed, drained_at + DEADLINE_SECONDS - 1.0 - time.monotonic())
    await wait_until(is_closed, 1.0 + DEADLINE_TOLERANCE_SECONDS)
    closed_at = time.monotonic()
    await wait_for_state(stack, node, "drained", 90.0)
    confirmed_at = time.monotonic()

    def is_used() -> bool:
        return node.port in {session_port(session) for session in idle}

    assert not is_used()
    started_at = time.monotonic()
    await undrain(stack, node)
    await wait_until(is_used, 60.0)
    return Durations(closed_at - drained_at, confirmed_at - closed_at, time.monotonic() - started_at)


@pytest.mark.timeout(900 if SOAK else 240)
async def test_no_session_and_no_deadline_notices_a_jump(clocked: ClockStack, database: str) -> None:
    stack = clocked.stack
    leaders = await replicas_of(clocked.follower)
    first_events = {id(http): (await stored_events(http))[-1]["id"] for http in (stack.api, clocked.follower)}
    started_at = time.time()
    nodes = [node for node, _ in zip(itertools.cycle(stack.tidb), OFFSETS, strict=False)]
    with closing(TrackedSessions(stack, database)) as sessions:
        idle = [sessions.through_envoy() for _ in range(_IDLE_SESSIONS)]
        for number, session in enumerate(idle):
            query_rows(session, f"set @number = {number}")
        async with DrillLoad(stack.sql_port, database, clients=6, statements_per_second=60) as load:
            durations = [
                await jump_during_drain(clocked, node, sessions, idle, offset)
                for node, offset in zip(nodes, OFFSETS, strict=True)
            ]
            await load.wait_for_statements()
        assert [query_value(session, "select @number") for session in idle] == list(range(_IDLE_SESSIONS))
    results = Counter[str]()
    for (_, result, reason), count in (await migration_counts(stack)).items():
        results[f"{result} {reason}"] += count
    print(
        f"\ndrill clock_jump: clock set to {OFFSETS} s; {load.statements} statements,"
        f" {len(load.errors)} errors, slowest {load.slowest_seconds:.2f} s; migrations {dict(results)};"
        f" {'; '.join(map(str, durations))}"
    )
    assert load.errors == []
    assert max(duration.confirmation for duration in durations) < MAX_CONFIRMATION_SECONDS
    assert not {result for result in results if result.startswith("lost")}, results
    await check_control_planes(clocked, leaders, first_events, started_at, {node.address for node in nodes})


async def check_control_planes(
    clocked: ClockStack,
    leaders: list[dict[str, Any]],
    first_events: dict[int, int],
    started_at: float,
    drained_nodes: set[str],
) -> None:
    """Check that no lease, no health check and no time of an event has followed the wrong clock."""
    assert {r["name"]: r["leader_since"] for r in await replicas_of(clocked.follower)} == {
        r["name"]: r["leader_since"] for r in leaders
    }
    assert await has_all_replicas(clocked.follower)
    for http in (clocked.stack.api, clocked.follower):
        events = await stored_events(http, first_events[id(http)])
        assert events
        times = [datetime.fromisoformat(event["at"]) for event in events]
        assert times == sorted(times)
        assert all(started_at - 2 < at.timestamp() < time.time() + 2 for at in times)
        kinds = {event["kind"] for event in events}
        assert not {kind for kind in kinds if kind.startswith(("replica.", "source.", "node_metrics."))}, (
            kinds
        )
        unhealthy = [e for e in events if e["kind"] == "node.state" and e["subject"] not in drained_nodes]
        assert unhealthy == []
        assert not [e for e in events if e["kind"] == "node.state" and e["data"]["to"] == "unhealthy"]
        (envoy,) = (await http.get("/v1/envoys")).raise_for_status().json()["envoys"]
        assert abs(datetime.fromisoformat(envoy["last_seen"]).timestamp() - time.time()) < 10
