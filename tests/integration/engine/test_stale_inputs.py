"""Decisions of the engine if facts are missing, late or wrongly dated.

There are three nodes. The metrics of the first node show failing TiKV requests. The second node has many
sessions of an Envoy that becomes silent. Another Envoy has a few sessions on each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from controlplane.clock import Clock
from controlplane.engine.engine import Engine
from controlplane.version import VERSION
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import StatusServer
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    FakeModule,
    fast_clock,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
from tests.support.controlplane.prometheus import FakePrometheus
from tests.support.controlplane.telemetry_messages import open_metrics_stream
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    http_response,
    mysql_packet,
    refusing_port,
    run_fake_server,
    send_parts,
)
from tests.support.waiting import wait_until

CLOCK_SPEED = 10
"""The engine's clock runs this many times faster, so an Envoy counts as silent after half a second."""
CLOCK_SKEW_SECONDS = 30.0
"""Seconds by which a clock is ahead or behind."""
FEW_SESSIONS, MANY_SESSIONS = 4, 20
"""Sessions of the reporting Envoy on each node, and of the silent Envoy on the second node."""
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SILENT_SECONDS = 5.5
"""An Envoy counts as silent after this many seconds of the engine's clock without a report."""


@dataclass(frozen=True)
class Case:
    """The source of node metrics, its clock error, and whether nodes have status ports."""

    source: Literal["the nodes", "Prometheus", "an unavailable Prometheus"]
    has_status: bool
    skew: float = 0.0

    def __str__(self) -> str:
        ports = "with" if self.has_status else "without"
        skew = f" with a clock {self.skew:+.0f} s off" if self.skew else ""
        return f"metrics from {self.source}{skew}, {ports} status ports"

    @property
    def has_metrics(self) -> bool:
        return self.source == "Prometheus" or (self.source == "the nodes" and self.has_status)


# Only Prometheus has a clock error: the engine dates all other inputs when they arrive.
CASES = [
    case
    for has_status in (True, False)
    for case in (
        Case("the nodes", has_status),
        Case("an unavailable Prometheus", has_status),
        Case("Prometheus", has_status, -CLOCK_SKEW_SECONDS),
        Case("Prometheus", has_status, CLOCK_SKEW_SECONDS),
    )
]


class FakePrometheusWithCounters:
    """Returns the same values for all hosts, except that half of the first host's TiKV requests fail.

    `clock` gives the time for queries that name no time. Counters increase with time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at = clock()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            parameters = FakePrometheus.parameters(await reader.readuntil(b"\r\n\r\n"))
            at = float(parameters["time"]) if "time" in parameters else self._clock()
            writer.write(http_response(200, json.dumps(self._answer(parameters["query"], at)).encode()))
            await writer.drain()

    def _answer(self, query: str, at: float) -> Mapping[str, Any]:
        seconds = at - self._started_at
        result = [
            {
                "metric": {"instance": host},
                "value": [at, str(self._value(query, seconds, is_failing=not number))],
            }
            for number, host in enumerate(HOSTS)
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": result}}

    @staticmethod
    def _value(query: str, seconds: float, *, is_failing: bool) -> float:
        if "timestamp(" in query:
            return 1.0  # age of the newest sample in seconds
        if "backoff_seconds_count" in query:
            return 50.0 * seconds if is_failing else 0.0
        if "failed_cmds" in query:
            return 0.0
        if "process_cpu" in query:
            return 0.1 * seconds
        if "process_resident" in query:
            return 0.1
        return 100.0 * seconds if "_count" in query else 100.0


@contextlib.asynccontextmanager
async def node(host: str, **metrics: float) -> AsyncIterator[tuple[str, SimNode]]:
    """Run a healthy node on this host with these metrics; yield its SQL address and the node."""
    sim_node = SimNode("node", "v8.5.3", "8.0.11-TiDB-v8.5.3", {}, is_serving=True)
    sim_node.simulated_metrics.set_values(json.dumps(metrics).encode())
    server = StatusServer(sim_node, SimSettings(SessionRules("unused")))
    listener = socket.create_server((host, 0))
    sim_node.status_port = listener.getsockname()[1]
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD)), host=host) as sql:
        await server.start(listener)
        try:
            yield sql.endpoint, sim_node
        finally:
            server.close()


@contextlib.asynccontextmanager
async def prometheus(case: Case, clock: Clock) -> AsyncIterator[Mapping[str, Any]]:
    if case.source == "the nodes":
        yield {}
    elif case.source == "Prometheus":
        async with run_fake_server(FakePrometheusWithCounters(clock)) as peer:
            yield {"url": f"http://{peer.endpoint}"}
    else:
        with refusing_port() as closed_port:
            yield {"url": f"http://{closed_port}"}


@contextlib.asynccontextmanager
async def run_module_reports(engine: Engine, envoy: str, counts: Mapping[str, int]) -> AsyncIterator[None]:
    """Report the sessions of an Envoy's module until the block ends; then the Envoy is silent."""
    async with open_metrics_stream(engine.xds_port) as stream:
        task = asyncio.create_task(FakeModule(counts, instance_id(envoy)).report(stream, envoy))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


def instance_id(envoy: str) -> str:
    return envoy.encode().hex().ljust(16, "0")


@pytest.fixture(autouse=True)
def _fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.engine.planner._TICK_SECONDS", 1 / CLOCK_SPEED)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_decisions_without_or_with_stale_facts(tmp_path: Path, case: Case) -> None:
    clock = fast_clock(CLOCK_SPEED)
    async with contextlib.AsyncExitStack() as stack:
        nodes = {}
        for host, tikv_failures, sessions in zip(
            HOSTS, (0.5, 0, 0), (FEW_SESSIONS, FEW_SESSIONS + MANY_SESSIONS, FEW_SESSIONS), strict=True
        ):
            address, sim_node = await stack.enter_async_context(node(host, tikv_failures=tikv_failures))
            sim_node.connections = sessions
            nodes[address] = {"status_address": f"{host}:{sim_node.status_port}"} if case.has_status else {}
        failing, overloaded, third = nodes
        source = await stack.enter_async_context(prometheus(case, lambda: clock() + case.skew))
        node_settings = [{"address": address, **status} for address, status in nodes.items()]
        balance = {"metrics": {"interval": 0.1}, "prometheus": source}
        engine = await stack.enter_async_context(
            run_engine(settings(tmp_path, nodes=node_settings, balance=balance), clock=clock)
        )
        for address in nodes:
            await wait_for_state(engine, address, "active")
        first = await stack.enter_async_context(FakeEnvoy(engine.xds_port, "one", module=VERSION))
        second = await stack.enter_async_context(FakeEnvoy(engine.xds_port, "two", module=VERSION))
        await stack.enter_async_context(
            run_module_reports(engine, "one", dict.fromkeys((failing, overloaded, third), FEW_SESSIONS))
        )

        def requested(envoy: str, since: int = 0) -> bool:
            """Return whether this Envoy was asked to migrate sessions away from the overloaded node."""
            return any(
                f"{instance_id(envoy)}=" in requests.get(overloaded, "")
                for requests in first.requested_migrations[since:]
            )

        def is_heavier(one: str, other: str) -> bool:
            weights = first.endpoints
            return weights[one][1] > weights[other][1]

        async with run_module_reports(engine, "two", {failing: 0, overloaded: MANY_SESSIONS, third: 0}):
            await wait_until(lambda: engine.cluster.node(overloaded).sessions == FEW_SESSIONS + MANY_SESSIONS)
            await wait_until(lambda: requested("two"))
            await wait_until(lambda: is_heavier(third, overloaded))
            # Without metrics, no node has a factor.
            await wait_until(lambda: bool(engine.cluster.node(failing).plan.factors) or not case.has_metrics)
            if case.source == "an unavailable Prometheus":
                await EventRecorder(engine).wait_for("node_metrics.outage")
            await wait_for_plans(engine, 1)
            expected = {failing: {"health"} if case.has_metrics else set(), overloaded: set(), third: set()}
            assert {a: set(engine.cluster.node(a).plan.factors) for a in expected} == expected
            if case.has_metrics:
                await wait_until(lambda: is_heavier(third, failing))
        # Only TiDB's counts, from the status ports, show whether the sessions of a silent Envoy have ended.
        silent_at = clock() + SILENT_SECONDS
        await wait_until(lambda: clock() > silent_at)
        await wait_for_plans(engine, 1)
        since = len(first.requested_migrations)
        if case.has_status:
            await wait_until(lambda: requested("one", since))
        else:
            await wait_for_plans(engine, 5)
            assert not requested("one", since)
        assert engine.cluster.node(overloaded).sessions == FEW_SESSIONS + MANY_SESSIONS
        assert is_heavier(third, overloaded)
        # Weights still change, and the two Envoys do not get them at the same instant.
        await wait_until(lambda: second.endpoints == first.endpoints)


async def test_clock_set_back_during_downtime_stops_nothing(
    tmp_path: Path,
) -> None:
    async with node(HOSTS[0], tikv_failures=0.5) as (failing, first), node(HOSTS[1]) as (other, second):
        node_settings = [
            {"address": failing, "status_address": f"{HOSTS[0]}:{first.status_port}"},
            {"address": other, "status_address": f"{HOSTS[1]}:{second.status_port}"},
        ]
        config = settings(tmp_path, nodes=node_settings, balance={"metrics": {"interval": 0.1}})
        clock = fast_clock(CLOCK_SPEED)

        def share(engine: Engine) -> float:
            return engine.cluster.node(failing).plan.factors["health"].share

        async with run_engine(config, clock=lambda: clock() + CLOCK_SKEW_SECONDS) as engine:
            await wait_until(
                lambda: bool(engine.cluster.nodes()) and bool(engine.cluster.node(failing).plan.factors)
            )
            await wait_until(lambda: share(engine) < 0.9)
        async with run_engine(config, clock=lambda: clock() - CLOCK_SKEW_SECONDS) as engine:
            await wait_for_state(engine, failing, "active")
            assert share(engine) < 1
            await wait_until(lambda: share(engine) < 0.8)
            async with FakeEnvoy(engine.xds_port) as envoy:
                await envoy.wait_for_endpoints(
                    lambda endpoints: failing in endpoints and endpoints[failing][1] < endpoints[other][1]
                )
