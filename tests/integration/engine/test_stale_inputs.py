"""What the engine makes of facts that are missing, late or dated otherwise, in every combination.

Three nodes. The first shows that its requests to TiKV fail, to whoever can read it. The second has many
sessions of an Envoy that falls silent. Another Envoy has a few on each of the three.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest

from controlplane.clock import Clock
from controlplane.engine.engine import Engine
from controlplane.version import VERSION
from sandbox.tidb_sim.mariadb_backend import BackendAddress
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import StatusServer
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    FakeModule,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
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

LAPSE = 10
"""Times the speed of the engine's clock: an Envoy is silent after half a second."""
SKEW = 30.0
"""Seconds by which clocks differ."""
FEW, MANY = 4, 20
"""Sessions of the Envoy that goes on telling, on each node, and of the other, on the second."""
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SILENT = 5.5
"""Seconds, by the engine's clock, after which an Envoy that tells nothing is silent."""


@dataclass(frozen=True)
class Case:
    """Where vital signs come from, by a clock that is so far off, and whether nodes have status ports."""

    source: Literal["the nodes", "Prometheus", "a Prometheus that is away"]
    has_status: bool
    skew: float = 0.0

    def __str__(self) -> str:
        ports = "with" if self.has_status else "without"
        skew = f" by a clock that is {self.skew:+.0f} s off" if self.skew else ""
        return f"signs from {self.source}{skew}, {ports} status ports"

    @property
    def shows(self) -> bool:
        """Whether vital signs can be read."""
        return self.source == "Prometheus" or (self.source == "the nodes" and self.has_status)


# An Envoy falls silent in each. Nobody else dates anything: what comes is dated when it arrives.
CASES = [
    case
    for has_status in (True, False)
    for case in (
        Case("the nodes", has_status),
        Case("a Prometheus that is away", has_status),
        Case("Prometheus", has_status, -SKEW),
        Case("Prometheus", has_status, SKEW),
    )
]


def lapse(since: float, offset: float = 0.0) -> Clock:
    """A clock that starts at the present time, so far off, and goes faster."""
    start = time.time() + offset
    return lambda: start + LAPSE * (time.monotonic() - since)


class StandInPrometheus:
    """A handler that knows the same of all hosts, but that half of what the first asks of TiKV fails.

    `clock` gives the times in its answers.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            (query,) = parse_qs(urlsplit(target).query)["query"]
            writer.write(http_response(200, json.dumps(self._answer(query)).encode()))
            await writer.drain()

    def _answer(self, query: str) -> Mapping[str, Any]:
        result = [
            {
                "metric": {"instance": host},
                "value": [self._clock(), str(self._value(query, is_ill=not number))],
            }
            for number, host in enumerate(HOSTS)
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": result}}

    @staticmethod
    def _value(query: str, *, is_ill: bool) -> float:
        if "timestamp(" in query:
            return 1.0  # the age of the newest sample, by its own clock
        if "backoff_seconds_count" in query:
            return 50.0 if is_ill else 0.0
        if "failed_cmds" in query or "deriv(" in query:
            return 0.0
        return 0.1 if "process_" in query else 100.0


@contextlib.asynccontextmanager
async def node(host: str, **signs: float) -> AsyncIterator[tuple[str, SimNode]]:
    """One in service on that host, which shows these vital signs: its SQL address, and what it tells."""
    shown = SimNode("node", "v8.5.3", "8.0.11-TiDB-v8.5.3", {}, lambda: None, lambda: None, is_serving=True)
    shown.simulated_metrics.set_values(json.dumps(signs).encode())
    server = StatusServer(shown, SimSettings(SessionRules(BackendAddress())))
    listener = socket.create_server((host, 0))
    shown.status_port = listener.getsockname()[1]
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD)), host=host) as sql:
        await server.start(listener)
        try:
            yield sql.endpoint, shown
        finally:
            server.close()


@contextlib.asynccontextmanager
async def prometheus(case: Case, clock: Clock) -> AsyncIterator[Mapping[str, Any]]:
    """The setting for where vital signs come from."""
    if case.source == "the nodes":
        yield {}
    elif case.source == "Prometheus":
        async with run_fake_server(StandInPrometheus(clock)) as peer:
            yield {"url": f"http://{peer.endpoint}"}
    else:
        with refusing_port() as nobody:
            yield {"url": f"http://{nobody}"}


@contextlib.asynccontextmanager
async def telling(engine: Engine, envoy: str, counts: Mapping[str, int]) -> AsyncIterator[None]:
    """The module of that Envoy tells of its sessions until the block ends; then the Envoy is silent."""
    async with open_metrics_stream(engine.xds_port) as stream:
        task = asyncio.create_task(FakeModule(counts, instance(envoy)).report(stream, envoy))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


def instance(envoy: str) -> str:
    """What the process of an Envoy is called."""
    return envoy.encode().hex().ljust(16, "0")


@pytest.fixture(autouse=True)
def _decides_as_often_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.engine.planner._TICK_SECONDS", 1 / LAPSE)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_facts_that_are_missing_are_neither_zero_nor_full(tmp_path: Path, case: Case) -> None:
    clock = lapse(began := time.monotonic())
    async with contextlib.AsyncExitStack() as held:
        nodes = {}
        for host, tikv_failures, sessions in zip(HOSTS, (0.5, 0, 0), (FEW, FEW + MANY, FEW), strict=True):
            address, shown = await held.enter_async_context(node(host, tikv_failures=tikv_failures))
            shown.connections = sessions
            nodes[address] = {"status_address": f"{host}:{shown.status_port}"} if case.has_status else {}
        ill, crowded, third = nodes
        source = await held.enter_async_context(prometheus(case, lapse(began, case.skew)))
        listed = [{"address": address, **status} for address, status in nodes.items()]
        balance = {"metrics": {"interval": 0.1}, "prometheus": source}
        engine = await held.enter_async_context(
            run_engine(settings(tmp_path, nodes=listed, balance=balance), clock=clock)
        )
        for address in nodes:
            await wait_for_state(engine, address, "active")
        first = await held.enter_async_context(FakeEnvoy(engine.xds_port, "one", module=VERSION))
        second = await held.enter_async_context(FakeEnvoy(engine.xds_port, "two", module=VERSION))
        await held.enter_async_context(telling(engine, "one", dict.fromkeys((ill, crowded, third), FEW)))

        def asked(envoy: str, since: int = 0) -> bool:
            """Whether it has been asked to move any of the sessions that it has on the crowded node."""
            return any(
                f"{instance(envoy)}=" in moves.get(crowded, "")
                for moves in first.requested_migrations[since:]
            )

        def is_heavier(one: str, other: str) -> bool:
            weights = first.endpoints
            return weights[one][1] > weights[other][1]

        async with telling(engine, "two", {ill: 0, crowded: MANY, third: 0}):
            await wait_until(lambda: engine.node(crowded).sessions == FEW + MANY)
            await wait_until(lambda: asked("two"))
            await wait_until(lambda: is_heavier(third, crowded))
            # What cannot be read is neither good nor bad.
            await wait_until(lambda: bool(engine.node(ill).plan.factors) or not case.shows)
            if case.source == "a Prometheus that is away":
                await EventRecorder(engine).wait_for("vitals.outage")
            await wait_for_plans(engine, 1)
            expected = {ill: {"health"} if case.shows else set(), crowded: set(), third: set()}
            assert {a: set(engine.node(a).plan.factors) for a in expected} == expected
            if case.shows:
                await wait_until(lambda: is_heavier(third, ill))
        # Nobody knows whether the sessions of an Envoy that is silent are over; but TiDB does.
        silent_at = clock() + SILENT
        await wait_until(lambda: clock() > silent_at)
        await wait_for_plans(engine, 1)
        since = len(first.requested_migrations)
        if case.has_status:
            await wait_until(lambda: asked("one", since))
        else:
            await wait_for_plans(engine, 5)
            assert not asked("one", since)
        assert engine.node(crowded).sessions == FEW + MANY
        assert is_heavier(third, crowded)
        assert second.endpoints == first.endpoints


async def test_a_clock_that_was_set_back_while_the_control_plane_was_down_stops_nothing(
    tmp_path: Path,
) -> None:
    async with node(HOSTS[0], tikv_failures=0.5) as (ill, first), node(HOSTS[1]) as (other, second):
        listed = [
            {"address": ill, "status_address": f"{HOSTS[0]}:{first.status_port}"},
            {"address": other, "status_address": f"{HOSTS[1]}:{second.status_port}"},
        ]
        wanted = settings(tmp_path, nodes=listed, balance={"metrics": {"interval": 0.1}})
        began = time.monotonic()

        def share(engine: Engine) -> float:
            return engine.node(ill).plan.factors["health"].share

        async with run_engine(wanted, clock=lapse(began, SKEW)) as engine:
            await wait_until(lambda: bool(engine.nodes()) and bool(engine.node(ill).plan.factors))
            await wait_until(lambda: share(engine) < 0.9)
        async with run_engine(wanted, clock=lapse(began, -SKEW)) as engine:
            await wait_for_state(engine, ill, "active")
            assert share(engine) < 1
            await wait_until(lambda: share(engine) < 0.8)
            async with FakeEnvoy(engine.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda told: ill in told and told[ill][1] < told[other][1])
