"""A real Envoy that knows several control planes goes from one to another, and no session notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from controlplane.config.settings import Settings
from controlplane.model.plan import EdsHealth
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.support.controlplane.peer_sync import FakeReplica, run_replicas
from tests.support.controlplane.xds_server import (
    EchoSession,
    StartEnvoy,
    make_node_plan,
    make_plan,
    run_echo_servers,
)
from tests.support.fake_servers import refusing_port
from tests.support.network_gate import NetworkGate, network_gates
from tests.support.waiting import assert_never, wait_until

# What changes in an Envoy when it takes something that it did not have. Endpoints may come again as they are.
_TAKEN = (
    r"^(listener_manager\.(listener_(added|modified|removed|create_success)|lds\.update_success)"
    r"|cluster_manager\.(cluster_(added|modified|removed)|cds\.update_success)"
    r"|cluster\.tidb\.(membership_change|max_host_weight|version))$"
)
_PUSHED = {
    "name": "envoy.stat_sinks.metrics_service",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": "tidevoy_control_plane"}},
    },
}


def settings(ports: Ports, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "xds": {"listen": "127.0.0.1:0"},
            "sql": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "balance": {"report_interval": 0.2},
            **more,
        }
    )


def bootstrap(wanted: Settings, planes: Sequence[str], *, delta: bool = False, **more: Any) -> str:
    """What `tidevoy bootstrap` prints, but a stock Envoy pushes its stats as one with the module does."""
    text = render_bootstrap(
        wanted, control_planes=planes, node_id="envoy-1", admin="127.0.0.1:0", delta=delta, **more
    )
    parsed = yaml.safe_load(text)
    parsed["stats_sinks"], parsed["stats_flush_interval"] = [_PUSHED], "0.2s"
    return yaml.safe_dump(parsed)


class Switch:
    """Control planes behind doors, and an Envoy that knows all of them."""

    def __init__(
        self, all_: list[FakeReplica], ways: list[NetworkGate], envoy: EnvoyProcess, port: int
    ) -> None:
        self.all, self.ways, self.envoy, self.port = all_, ways, envoy, port

    def where(self) -> int | None:
        """Which of them the Envoy is connected to, if it is one."""
        there = [
            index
            for index, station in enumerate(self.all)
            if any(status.connected_since is not None for status in station.xds.statuses())
        ]
        return there[0] if len(there) == 1 else None

    async def leaves(self, gone: int, seconds: float) -> float:
        """Waits until the Envoy is at another one; how long that took."""
        begun = time.monotonic()
        others = [station for index, station in enumerate(self.all) if index != gone]
        await wait_until(
            lambda: any(s.connected_since is not None for each in others for s in each.xds.statuses()),
            seconds,
        )
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def switch(
    ports: Ports, start_envoy: StartEnvoy, *names: str, delta: bool = False
) -> AsyncIterator[Switch]:
    wanted = settings(ports)
    async with run_replicas(wanted, *names) as all_, network_gates(*(each.address for each in all_)) as ways:
        envoy = await start_envoy(bootstrap(wanted, [way.address for way in ways], delta=delta))
        yield Switch(all_, ways, envoy, int(wanted.sql.listen.rpartition(":")[2]))


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_an_envoy_that_switches_sees_no_change_and_its_sessions_live_on(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("a", "b") as (a, b),
        switch(ports, envoy_process, "one", "two", delta=delta) as parts,
    ):
        same = make_plan(
            make_node_plan("a:4000", a.endpoint, weight=70),
            make_node_plan("b:4000", b.endpoint, EdsHealth.DRAINING, 0),
        )
        for each in parts.all:
            each.xds.publish(same, at_once=True, stamp=(3, 9))
        await wait_until(lambda: parts.where() is not None)
        at = parts.where()
        assert at is not None
        await wait_until(parts.all[at].sees_envoy_acked)
        acked = parts.all[at].require_envoy().status.acked_version
        await wait_until(parts.envoy.is_live)
        session = await EchoSession.open(parts.port)
        before, endpoints = await parts.envoy.stats(_TAKEN), await parts.envoy.hosts("tidb")
        assert before["listener_manager.listener_added"] == 1
        try:
            # There and back. By then both are left out for a while, so any of them is tried.
            for limit in (3.0, 10.0):
                at = parts.where()
                assert at is not None
                await parts.ways[at].close()
                await parts.leaves(at, limit)
                there = parts.all[1 - at]
                await wait_until(lambda there=there: there.require_envoy().status.eds_acked)  # type: ignore[misc]
                status = there.require_envoy().status
                assert (status.acked_version, status.published_version) == (acked, acked)
                assert await parts.envoy.stats(_TAKEN) == before
                assert (await parts.envoy.hosts("tidb")).keys() == endpoints.keys()
                assert await session.is_alive()
                await parts.ways[at].open()
            for each in parts.all:
                assert not any(kind in ("envoy.duplicate", "envoy.nack") for kind, _, _ in each.events)
        finally:
            session.close()


async def test_what_an_envoy_tells_goes_on_at_another_control_plane(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with run_echo_servers("a") as (a,), switch(ports, envoy_process, "one", "two", "three") as parts:
        for each in parts.all:
            each.xds.publish(make_plan(make_node_plan("a:4000", a.endpoint)), stamp=(1, 1))
        await wait_until(
            lambda: any(s.load_report_envoys for s in parts.all) and any(s.metrics_streams for s in parts.all)
        )
        for gone in range(3):  # wherever its three streams are
            await parts.ways[gone].close()
            left = [each for index, each in enumerate(parts.all) if index != gone]
            for each in left:
                each.metrics_streams.clear()
                each.load_report_envoys.clear()
                each.loads.clear()
            await parts.leaves(gone, 3.0)
            await wait_until(partial(any_has, left, "metrics_streams"), 5.0)
            # Envoy waits 5 s before it opens this stream again.
            await wait_until(partial(any_has, left, "load_report_envoys"), 9.0)
            for each in left:
                await wait_until(partial(any_has, [each], "loads"), 5.0)
            await parts.ways[gone].open()


def any_has(all_: Sequence[FakeReplica], what: str) -> bool:
    """Whether one of them has been told more than what was on its way."""
    return any(len(getattr(each, what)) > 2 for each in all_)


async def test_a_control_plane_that_hangs_is_left(ports: Ports, envoy_process: StartEnvoy) -> None:
    """Its kernel still makes connections and acknowledges what is sent: only keepalive can tell."""
    async with switch(ports, envoy_process, "one", "two", "three") as parts:
        for each in parts.all:
            each.xds.publish(make_plan(), stamp=(1, 1))
        await wait_until(lambda: parts.where() is not None)
        at = parts.where()
        assert at is not None
        parts.ways[at].stall()
        others = [each for index, each in enumerate(parts.all) if index != at]
        for each in others:
            each.load_report_envoys.clear()
        assert (
            await parts.leaves(at, 20.0) < 9.0
        )  # 3 s until it is asked, 3 s for the answer, and the next try
        await wait_until(partial(any_has, others, "load_report_envoys"), 6.0)
        parts.ways[at].resume()


async def test_one_that_refuses_keeps_nobody_from_the_others(ports: Ports, envoy_process: StartEnvoy) -> None:
    wanted = settings(ports)
    with refusing_port() as refusing, refusing_port() as refusing_too:
        async with run_replicas(wanted, "one") as (one,):
            one.xds.publish(make_plan(), stamp=(1, 1))
            await envoy_process(bootstrap(wanted, [refusing, one.address, refusing_too]))
            await wait_until(lambda: one.find_envoy() is not None and one.sees_envoy_acked(), 5.0)
            await wait_until(lambda: bool(one.metrics_streams) and bool(one.load_report_envoys), 20.0)
            streams = set(one.metrics_streams)
            await assert_never(lambda: len(one.events) > 1 or set(one.metrics_streams) != streams, 4.0)
            assert [kind for kind, _, _ in one.events] == ["envoy.connected"]


async def test_each_control_plane_is_known_by_its_own_name(
    ports: Ports, envoy_process: StartEnvoy, tmp_path: Path
) -> None:
    """Every certificate holds its own host alone."""
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    async with contextlib.AsyncExitStack() as stack:
        planes = []
        for host in ("127.0.0.1", "127.0.0.2"):
            cert, key = tmp_path / f"{host}.pem", tmp_path / f"{host}.key"
            issued = authority.issue_cert(host)
            issued.cert_chain_pems[0].write_to_path(cert)
            issued.private_key_pem.write_to_path(key)
            wanted = settings(ports, xds={"listen": f"{host}:0", "tls": {"cert": str(cert), "key": str(key)}})
            plane = FakeReplica(host, wanted)
            await plane.start()
            stack.push_async_callback(plane.stop)
            plane.xds.publish(make_plan(), at_once=True, stamp=(1, 1))
            planes.append(plane)
        addresses = [f"{plane.name}:{plane.xds.port}" for plane in planes]
        envoy = await envoy_process(bootstrap(wanted, addresses, tls=ControlPlaneTls(str(ca))))
        first = await next_one(planes)
        await first.stop()
        (second,) = (plane for plane in planes if plane is not first)
        await wait_until(lambda: second.find_envoy() is not None and second.sees_envoy_acked(), 10.0)
        stats = await envoy.stats("cluster.tidevoy_control_plane.ssl.fail_verify_(san|error)")
        assert set(stats.values()) == {0}


async def next_one(planes: Sequence[FakeReplica]) -> FakeReplica:
    """The first of them that an Envoy has come to, and taken all from."""
    async with asyncio.timeout(20):
        while True:
            for plane in planes:
                if plane.find_envoy() is not None and plane.sees_envoy_acked():
                    return plane
            await asyncio.sleep(0.01)
