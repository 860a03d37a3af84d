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
from controlplane.model.plan import Advice
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.support.controlplane.peer_sync import Station, stations
from tests.support.controlplane.xds_server import Session, StartEnvoy, echoes, plan, planned
from tests.support.fake_servers import closed_port
from tests.support.network_gate import Door, doors
from tests.support.waiting import never, until

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
            "sql": {"listen": f"127.0.0.1:{ports.take()}"},
            "balance": {"report_interval": 0.2},
            **more,
        }
    )


def bootstrap(wanted: Settings, planes: Sequence[str], *, delta: bool = False, **more: Any) -> str:
    """What `tidevoy bootstrap` prints, but a stock Envoy pushes its stats as one with the module does."""
    text = render(wanted, control_planes=planes, node_id="envoy-1", admin="127.0.0.1:0", delta=delta, **more)
    parsed = yaml.safe_load(text)
    parsed["stats_sinks"], parsed["stats_flush_interval"] = [_PUSHED], "0.2s"
    return yaml.safe_dump(parsed)


class Switch:
    """Control planes behind doors, and an Envoy that knows all of them."""

    def __init__(self, all_: list[Station], ways: list[Door], envoy: EnvoyProcess, port: int) -> None:
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
        await until(
            lambda: any(s.connected_since is not None for each in others for s in each.xds.statuses()),
            seconds,
        )
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def switch(
    ports: Ports, start_envoy: StartEnvoy, *names: str, delta: bool = False
) -> AsyncIterator[Switch]:
    wanted = settings(ports)
    async with stations(wanted, *names) as all_, doors(*(each.address for each in all_)) as ways:
        envoy = await start_envoy(bootstrap(wanted, [way.address for way in ways], delta=delta))
        yield Switch(all_, ways, envoy, int(wanted.sql.listen.rpartition(":")[2]))


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_an_envoy_that_switches_sees_no_change_and_its_sessions_live_on(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        echoes("a", "b") as (a, b),
        switch(ports, envoy_process, "one", "two", delta=delta) as parts,
    ):
        same = plan(
            planned("a:4000", a.endpoint, weight=70), planned("b:4000", b.endpoint, Advice.DRAINING, 0)
        )
        for each in parts.all:
            each.xds.publish(same, at_once=True, stamp=(3, 9))
        await until(lambda: parts.where() is not None)
        at = parts.where()
        assert at is not None
        await until(parts.all[at].is_acked)
        acked = parts.all[at].placed().status.acked_version
        await until(parts.envoy.live)
        session = await Session.open(parts.port)
        before, endpoints = await parts.envoy.stats(_TAKEN), await parts.envoy.hosts("tidb")
        assert before["listener_manager.listener_added"] == 1
        try:
            # There and back. By then both are left out for a while, so any of them is tried.
            for limit in (3.0, 10.0):
                at = parts.where()
                assert at is not None
                await parts.ways[at].shut()
                await parts.leaves(at, limit)
                there = parts.all[1 - at]
                await until(lambda there=there: there.placed().status.endpoints_acked)  # type: ignore[misc]
                status = there.placed().status
                assert (status.acked_version, status.published_version) == (acked, acked)
                assert await parts.envoy.stats(_TAKEN) == before
                assert (await parts.envoy.hosts("tidb")).keys() == endpoints.keys()
                assert await session.lives()
                await parts.ways[at].open()
            for each in parts.all:
                assert not any(kind in ("envoy.duplicate", "envoy.nack") for kind, _, _ in each.events)
        finally:
            session.close()


async def test_what_an_envoy_tells_goes_on_at_another_control_plane(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with echoes("a") as (a,), switch(ports, envoy_process, "one", "two", "three") as parts:
        for each in parts.all:
            each.xds.publish(plan(planned("a:4000", a.endpoint)), stamp=(1, 1))
        await until(lambda: any(s.reported for s in parts.all) and any(s.messages for s in parts.all))
        for gone in range(3):  # wherever its three streams are
            await parts.ways[gone].shut()
            left = [each for index, each in enumerate(parts.all) if index != gone]
            for each in left:
                each.messages.clear()
                each.reported.clear()
                each.loads.clear()
            await parts.leaves(gone, 3.0)
            await until(partial(any_has, left, "messages"), 5.0)
            # Envoy waits 5 s before it opens this stream again.
            await until(partial(any_has, left, "reported"), 9.0)
            for each in left:
                await until(partial(any_has, [each], "loads"), 5.0)
            await parts.ways[gone].open()


def any_has(all_: Sequence[Station], what: str) -> bool:
    """Whether one of them has been told more than what was on its way."""
    return any(len(getattr(each, what)) > 2 for each in all_)


async def test_a_control_plane_that_hangs_is_left(ports: Ports, envoy_process: StartEnvoy) -> None:
    """Its kernel still makes connections and acknowledges what is sent: only keepalive can tell."""
    async with switch(ports, envoy_process, "one", "two", "three") as parts:
        for each in parts.all:
            each.xds.publish(plan(), stamp=(1, 1))
        await until(lambda: parts.where() is not None)
        at = parts.where()
        assert at is not None
        parts.ways[at].silence()
        others = [each for index, each in enumerate(parts.all) if index != at]
        for each in others:
            each.reported.clear()
        assert (
            await parts.leaves(at, 20.0) < 9.0
        )  # 3 s until it is asked, 3 s for the answer, and the next try
        await until(partial(any_has, others, "reported"), 6.0)
        parts.ways[at].speak()


async def test_one_that_refuses_keeps_nobody_from_the_others(ports: Ports, envoy_process: StartEnvoy) -> None:
    wanted = settings(ports)
    with closed_port() as refusing, closed_port() as refusing_too:
        async with stations(wanted, "one") as (one,):
            one.xds.publish(plan(), stamp=(1, 1))
            await envoy_process(bootstrap(wanted, [refusing, one.address, refusing_too]))
            await until(lambda: one.find() is not None and one.is_acked(), 5.0)
            await until(lambda: bool(one.messages) and bool(one.reported), 20.0)
            streams = set(one.messages)
            await never(lambda: len(one.events) > 1 or set(one.messages) != streams, 4.0)
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
            plane = Station(host, wanted)
            await plane.start()
            stack.push_async_callback(plane.stop)
            plane.xds.publish(plan(), at_once=True, stamp=(1, 1))
            planes.append(plane)
        addresses = [f"{plane.name}:{plane.xds.port}" for plane in planes]
        envoy = await envoy_process(bootstrap(wanted, addresses, tls=ControlPlaneTls(str(ca))))
        first = await next_one(planes)
        await first.stop()
        (second,) = (plane for plane in planes if plane is not first)
        await until(lambda: second.find() is not None and second.is_acked(), 10.0)
        stats = await envoy.stats("cluster.tidevoy_control_plane.ssl.fail_verify_(san|error)")
        assert set(stats.values()) == {0}


async def next_one(planes: Sequence[Station]) -> Station:
    """The first of them that an Envoy has come to, and taken all from."""
    async with asyncio.timeout(20):
        while True:
            for plane in planes:
                if plane.find() is not None and plane.is_acked():
                    return plane
            await asyncio.sleep(0.01)
