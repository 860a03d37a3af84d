"""Failover of a real Envoy between several control planes, without effects on sessions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trustme
import yaml

from controlplane.config.settings import Settings
from controlplane.model.plan import EdsHealth
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.peer_sync import FakeReplica, run_replicas
from tests.support.controlplane.xds_server import (
    EchoSession,
    make_node_plan,
    make_plan,
    run_echo_servers,
)
from tests.support.fake_servers import refusing_port
from tests.support.stallable_forwarder import StallableForwarder, run_stallable_forwarders
from tests.support.waiting import assert_never, wait_until

# Stats that change when Envoy applies a changed resource, but not when it gets unchanged endpoints.
_APPLY_STATS = (
    r"^(listener_manager\.(listener_(added|modified|removed|create_success)|lds\.update_success)"
    r"|cluster_manager\.(cluster_(added|modified|removed)|cds\.update_success)"
    r"|cluster\.tidb\.(membership_change|max_host_weight|version))$"
)
_METRICS_SINK = {
    "name": "envoy.stat_sinks.metrics_service",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": "tidevoy_control_plane"}},
    },
}


def settings(ports: Ports, **overrides: Any) -> Settings:
    return Settings.model_validate(
        {
            "xds": {"listen": "127.0.0.1:0"},
            "sql": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "balance": {"report_interval": 0.2},
            **overrides,
        }
    )


def bootstrap(
    config: Settings, control_planes: Sequence[str], *, delta: bool = False, **overrides: Any
) -> str:
    """Return the output of `tidevoy bootstrap`, plus the stats sink that only Envoys with the module get."""
    text = render_bootstrap(
        config,
        control_planes=control_planes,
        node_id="envoy-1",
        admin="127.0.0.1:0",
        delta=delta,
        **overrides,
    )
    parsed = yaml.safe_load(text)
    parsed["stats_sinks"], parsed["stats_flush_interval"] = [_METRICS_SINK], "0.2s"
    return yaml.safe_dump(parsed)


class FailoverTestBed:
    """Control planes behind forwarders, and an Envoy that knows all of them."""

    def __init__(
        self,
        replicas: list[FakeReplica],
        forwarders: list[StallableForwarder],
        envoy: EnvoyProcess,
        port: int,
    ) -> None:
        self.replicas, self.forwarders, self.envoy, self.port = replicas, forwarders, envoy, port

    def connected_index(self) -> int | None:
        """Return the index of the Envoy's control plane, or None if there is not exactly one."""
        connected = [
            index
            for index, replica in enumerate(self.replicas)
            if any(status.connected_since is not None for status in replica.xds.statuses())
        ]
        return connected[0] if len(connected) == 1 else None

    async def wait_for_failover(self, failed: int, seconds: float) -> float:
        """Wait until the Envoy is connected to another control plane; return the seconds that it took."""
        start = time.monotonic()
        others = [replica for index, replica in enumerate(self.replicas) if index != failed]
        await wait_until(
            lambda: any(s.connected_since is not None for replica in others for s in replica.xds.statuses()),
            seconds,
        )
        return time.monotonic() - start


@contextlib.asynccontextmanager
async def failover_test_bed(
    ports: Ports, start_envoy: StartEnvoy, *names: str, delta: bool = False
) -> AsyncIterator[FailoverTestBed]:
    config = settings(ports)
    async with (
        run_replicas(config, *names) as replicas,
        run_stallable_forwarders(*(replica.address for replica in replicas)) as forwarders,
    ):
        envoy = await start_envoy(
            bootstrap(config, [forwarder.address for forwarder in forwarders], delta=delta)
        )
        yield FailoverTestBed(replicas, forwarders, envoy, int(config.sql.listen.rpartition(":")[2]))


async def test_failover_changes_no_resource_and_keeps_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("a", "b") as (a, b),
        failover_test_bed(ports, envoy_process, "one", "two", delta=delta) as test_bed,
    ):
        same = make_plan(
            make_node_plan("a:4000", a.endpoint, weight=70),
            make_node_plan("b:4000", b.endpoint, EdsHealth.DRAINING, 0),
        )
        for replica in test_bed.replicas:
            replica.xds.publish(same, at_once=True, stamp=(3, 9))
        await wait_until(lambda: test_bed.connected_index() is not None)
        index = test_bed.connected_index()
        assert index is not None
        await wait_until(test_bed.replicas[index].sees_envoy_acked)
        acked = test_bed.replicas[index].require_envoy().status.acked_version
        await wait_until(test_bed.envoy.is_live)
        session = await EchoSession.open(test_bed.port)
        before, endpoints = await test_bed.envoy.stats(_APPLY_STATS), await test_bed.envoy.hosts("tidb")
        assert before["listener_manager.listener_added"] == 1
        try:
            # Fail over, then back. The way back is slower, because Envoy has ejected both control planes.
            for limit in (3.0, 10.0):
                index = test_bed.connected_index()
                assert index is not None
                await test_bed.forwarders[index].close()
                await test_bed.wait_for_failover(index, limit)
                other = test_bed.replicas[1 - index]
                await wait_until(lambda other=other: other.require_envoy().status.has_acknowledged_endpoints)  # type: ignore[misc]
                status = other.require_envoy().status
                assert (status.acked_version, status.published_version) == (acked, acked)
                assert await test_bed.envoy.stats(_APPLY_STATS) == before
                assert (await test_bed.envoy.hosts("tidb")).keys() == endpoints.keys()
                assert await session.is_alive()
                await test_bed.forwarders[index].open()
            for replica in test_bed.replicas:
                assert not any(kind in ("envoy.duplicate", "envoy.nack") for kind, _, _ in replica.events)
        finally:
            session.close()


async def test_envoy_reports_continue_at_another_control_plane(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (a,),
        failover_test_bed(ports, envoy_process, "one", "two", "three") as test_bed,
    ):
        for replica in test_bed.replicas:
            replica.xds.publish(make_plan(make_node_plan("a:4000", a.endpoint)), stamp=(1, 1))
        await wait_until(
            lambda: (
                any(s.load_report_envoys for s in test_bed.replicas)
                and any(s.metrics_streams for s in test_bed.replicas)
            )
        )
        for cut in range(3):  # the Envoy may have its three streams at different control planes
            await test_bed.forwarders[cut].close()
            others = [replica for index, replica in enumerate(test_bed.replicas) if index != cut]
            for replica in others:
                replica.metrics_streams.clear()
                replica.load_report_envoys.clear()
                replica.loads.clear()
            await test_bed.wait_for_failover(cut, 3.0)
            await wait_until(partial(any_receives, others, "metrics_streams"), 5.0)
            # Envoy waits 5 s before it opens the load report stream again.
            await wait_until(partial(any_receives, others, "load_report_envoys"), 9.0)
            for replica in others:
                await wait_until(partial(any_receives, [replica], "loads"), 5.0)
            await test_bed.forwarders[cut].open()


def any_receives(replicas: Sequence[FakeReplica], attribute: str) -> bool:
    """Return whether a replica has received more than the two items that may have been in flight."""
    return any(len(getattr(replica, attribute)) > 2 for replica in replicas)


async def test_envoy_leaves_a_hanging_control_plane(ports: Ports, envoy_process: StartEnvoy) -> None:
    """The kernel still accepts connections and acknowledges data, so only keepalive detects the hang."""
    async with failover_test_bed(ports, envoy_process, "one", "two", "three") as test_bed:
        for replica in test_bed.replicas:
            replica.xds.publish(make_plan(), stamp=(1, 1))
        await wait_until(lambda: test_bed.connected_index() is not None)
        hanging = test_bed.connected_index()
        assert hanging is not None
        test_bed.forwarders[hanging].stall()
        others = [replica for index, replica in enumerate(test_bed.replicas) if index != hanging]
        for replica in others:
            replica.load_report_envoys.clear()
        # Envoy sends a ping after 3 s, waits 3 s for the answer, and then connects to another control plane.
        assert await test_bed.wait_for_failover(hanging, 20.0) < 9.0
        await wait_until(partial(any_receives, others, "load_report_envoys"), 6.0)
        test_bed.forwarders[hanging].resume()


async def test_unreachable_control_plane_does_not_block_the_others(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    config = settings(ports)
    with refusing_port() as refusing, refusing_port() as also_refusing:
        async with run_replicas(config, "one") as (one,):
            one.xds.publish(make_plan(), stamp=(1, 1))
            await envoy_process(bootstrap(config, [refusing, one.address, also_refusing]))
            await wait_until(lambda: one.find_envoy() is not None and one.sees_envoy_acked(), 5.0)
            await wait_until(lambda: bool(one.metrics_streams) and bool(one.load_report_envoys), 20.0)
            streams = set(one.metrics_streams)
            await assert_never(lambda: len(one.events) > 1 or set(one.metrics_streams) != streams, 4.0)
            assert [kind for kind, _, _ in one.events] == ["envoy.connected"]


async def test_each_control_plane_is_verified_by_its_own_host_name(
    ports: Ports, envoy_process: StartEnvoy, tmp_path: Path
) -> None:
    """Each certificate contains only the host of its own control plane."""
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    async with contextlib.AsyncExitStack() as stack:
        control_planes = []
        for host in ("127.0.0.1", "127.0.0.2"):
            cert, key = tmp_path / f"{host}.pem", tmp_path / f"{host}.key"
            issued = authority.issue_cert(host)
            issued.cert_chain_pems[0].write_to_path(cert)
            issued.private_key_pem.write_to_path(key)
            config = settings(ports, xds={"listen": f"{host}:0", "tls": {"cert": str(cert), "key": str(key)}})
            control_plane = FakeReplica(host, config)
            await control_plane.start()
            stack.push_async_callback(control_plane.stop)
            control_plane.xds.publish(make_plan(), at_once=True, stamp=(1, 1))
            control_planes.append(control_plane)
        addresses = [f"{control_plane.name}:{control_plane.xds.port}" for control_plane in control_planes]
        envoy = await envoy_process(bootstrap(config, addresses, tls=ControlPlaneTls(str(ca))))
        first = await wait_for_connected(control_planes)
        await first.stop()
        (second,) = (control_plane for control_plane in control_planes if control_plane is not first)
        await wait_until(lambda: second.find_envoy() is not None and second.sees_envoy_acked(), 10.0)
        stats = await envoy.stats("cluster.tidevoy_control_plane.ssl.fail_verify_(san|error)")
        assert set(stats.values()) == {0}


async def wait_for_connected(control_planes: Sequence[FakeReplica]) -> FakeReplica:
    """Wait until the Envoy has acknowledged all resources of a control plane; return this control plane."""
    async with asyncio.timeout(20):
        while True:
            for control_plane in control_planes:
                if control_plane.find_envoy() is not None and control_plane.sees_envoy_acked():
                    return control_plane
            await asyncio.sleep(0.01)
