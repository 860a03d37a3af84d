"""Failover of a real Envoy between several control planes, which sessions do not notice."""

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

# Envoy stats that change when it applies a changed resource. Unchanged endpoints may be sent again.
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
    """Return the output of `tidevoy bootstrap`, but with the stats sink that only the module gets."""
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


class FailoverRig:
    """Control planes behind network gates, and an Envoy that knows all of them."""

    def __init__(
        self, replicas: list[FakeReplica], gates: list[NetworkGate], envoy: EnvoyProcess, port: int
    ) -> None:
        self.replicas, self.gates, self.envoy, self.port = replicas, gates, envoy, port

    def connected_index(self) -> int | None:
        """Return the index of the control plane that the Envoy is connected to, if it is exactly one."""
        connected = [
            index
            for index, replica in enumerate(self.replicas)
            if any(status.connected_since is not None for status in replica.xds.statuses())
        ]
        return connected[0] if len(connected) == 1 else None

    async def wait_for_failover(self, failed: int, seconds: float) -> float:
        """Wait until the Envoy is connected to another control plane; return how long that took."""
        start = time.monotonic()
        others = [replica for index, replica in enumerate(self.replicas) if index != failed]
        await wait_until(
            lambda: any(s.connected_since is not None for replica in others for s in replica.xds.statuses()),
            seconds,
        )
        return time.monotonic() - start


@contextlib.asynccontextmanager
async def failover_rig(
    ports: Ports, start_envoy: StartEnvoy, *names: str, delta: bool = False
) -> AsyncIterator[FailoverRig]:
    config = settings(ports)
    async with (
        run_replicas(config, *names) as replicas,
        network_gates(*(replica.address for replica in replicas)) as gates,
    ):
        envoy = await start_envoy(bootstrap(config, [gate.address for gate in gates], delta=delta))
        yield FailoverRig(replicas, gates, envoy, int(config.sql.listen.rpartition(":")[2]))


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_failover_changes_no_resource_and_keeps_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("a", "b") as (a, b),
        failover_rig(ports, envoy_process, "one", "two", delta=delta) as rig,
    ):
        same = make_plan(
            make_node_plan("a:4000", a.endpoint, weight=70),
            make_node_plan("b:4000", b.endpoint, EdsHealth.DRAINING, 0),
        )
        for replica in rig.replicas:
            replica.xds.publish(same, at_once=True, stamp=(3, 9))
        await wait_until(lambda: rig.connected_index() is not None)
        index = rig.connected_index()
        assert index is not None
        await wait_until(rig.replicas[index].sees_envoy_acked)
        acked = rig.replicas[index].require_envoy().status.acked_version
        await wait_until(rig.envoy.is_live)
        session = await EchoSession.open(rig.port)
        before, endpoints = await rig.envoy.stats(_APPLY_STATS), await rig.envoy.hosts("tidb")
        assert before["listener_manager.listener_added"] == 1
        try:
            # There and back. By then Envoy ejects both for a while, so it tries either of them.
            for limit in (3.0, 10.0):
                index = rig.connected_index()
                assert index is not None
                await rig.gates[index].close()
                await rig.wait_for_failover(index, limit)
                other = rig.replicas[1 - index]
                await wait_until(lambda other=other: other.require_envoy().status.eds_acked)  # type: ignore[misc]
                status = other.require_envoy().status
                assert (status.acked_version, status.published_version) == (acked, acked)
                assert await rig.envoy.stats(_APPLY_STATS) == before
                assert (await rig.envoy.hosts("tidb")).keys() == endpoints.keys()
                assert await session.is_alive()
                await rig.gates[index].open()
            for replica in rig.replicas:
                assert not any(kind in ("envoy.duplicate", "envoy.nack") for kind, _, _ in replica.events)
        finally:
            session.close()


async def test_envoy_reports_continue_at_another_control_plane(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (a,),
        failover_rig(ports, envoy_process, "one", "two", "three") as rig,
    ):
        for replica in rig.replicas:
            replica.xds.publish(make_plan(make_node_plan("a:4000", a.endpoint)), stamp=(1, 1))
        await wait_until(
            lambda: (
                any(s.load_report_envoys for s in rig.replicas)
                and any(s.metrics_streams for s in rig.replicas)
            )
        )
        for cut in range(3):  # wherever its three streams are
            await rig.gates[cut].close()
            others = [replica for index, replica in enumerate(rig.replicas) if index != cut]
            for replica in others:
                replica.metrics_streams.clear()
                replica.load_report_envoys.clear()
                replica.loads.clear()
            await rig.wait_for_failover(cut, 3.0)
            await wait_until(partial(any_receives, others, "metrics_streams"), 5.0)
            # Envoy waits 5 s before it opens this stream again.
            await wait_until(partial(any_receives, others, "load_report_envoys"), 9.0)
            for replica in others:
                await wait_until(partial(any_receives, [replica], "loads"), 5.0)
            await rig.gates[cut].open()


def any_receives(replicas: Sequence[FakeReplica], attribute: str) -> bool:
    """Return whether a replica has received more than what may have been in flight."""
    return any(len(getattr(replica, attribute)) > 2 for replica in replicas)


async def test_envoy_leaves_a_hanging_control_plane(ports: Ports, envoy_process: StartEnvoy) -> None:
    """Its kernel still accepts connections and acknowledges data: only keepalive detects the hang."""
    async with failover_rig(ports, envoy_process, "one", "two", "three") as rig:
        for replica in rig.replicas:
            replica.xds.publish(make_plan(), stamp=(1, 1))
        await wait_until(lambda: rig.connected_index() is not None)
        hanging = rig.connected_index()
        assert hanging is not None
        rig.gates[hanging].stall()
        others = [replica for index, replica in enumerate(rig.replicas) if index != hanging]
        for replica in others:
            replica.load_report_envoys.clear()
        assert (
            await rig.wait_for_failover(hanging, 20.0) < 9.0
        )  # 3 s until the ping, 3 s for its answer, and the next attempt
        await wait_until(partial(any_receives, others, "load_report_envoys"), 6.0)
        rig.gates[hanging].resume()


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
    """Every certificate contains only its own host."""
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
    """Return the first control plane whose resources an Envoy has all acknowledged."""
    async with asyncio.timeout(20):
        while True:
            for control_plane in control_planes:
                if control_plane.find_envoy() is not None and control_plane.sees_envoy_acked():
                    return control_plane
            await asyncio.sleep(0.01)
