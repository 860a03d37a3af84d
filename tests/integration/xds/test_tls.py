"""TLS between Envoys and the control plane: who is let in, under which name, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2

from controlplane.clock import monotonic_unix_clock
from controlplane.config.settings import Settings, XdsTls
from controlplane.model.facts import EnvoyLoad
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from controlplane.xds.resource_type import CLUSTER
from controlplane.xds.server import XdsServer
from controlplane.xds.server_certificates import ServerCertificates
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.support.controlplane.engine import run_engine, settings
from tests.support.controlplane.telemetry_messages import metrics_message, module_info_family
from tests.support.controlplane.xds_certificates import (
    EXPIRED_AT,
    EXPIRES_SOON_AT,
    XdsPki,
    channel_credentials,
    channel_credentials_with_uri,
)
from tests.support.controlplane.xds_server import (
    StartEnvoy,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_rig,
)
from tests.support.module.bootstrap import require_module
from tests.support.waiting import wait_until

_ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService"
_LOADS = "/envoy.service.load_stats.v3.LoadReportingService/StreamLoadStats"
_METRICS = "/envoy.service.metrics.v3.MetricsService/StreamMetrics"


@pytest.fixture
def pki(tmp_path: Path) -> XdsPki:
    return XdsPki(tmp_path)


# --- a real Envoy ---


async def dynamic_resources(envoy: EnvoyProcess) -> list[str]:
    """Names of all that an Envoy has from its control plane."""
    dump = (await envoy.get("/config_dump?include_eds")).json()
    lists = {"dynamic_listeners", "dynamic_active_clusters", "dynamic_warming_clusters"}
    found = [f"{key} {one}" for part in dump["configs"] for key in lists & part.keys() for one in part[key]]
    # The cluster that leads to the control plane is a static one.
    endpoints = [part.get("dynamic_endpoint_configs", []) for part in dump["configs"]]
    return found + [f"endpoints {one}" for part in endpoints for one in part]


async def test_an_envoy_with_the_right_certificate_gets_all(
    ports: Ports, envoy_process: StartEnvoy, pki: XdsPki
) -> None:
    tls = pki.envoy_tls(pki.authority.issue_cert("envoy-1", not_after=EXPIRES_SOON_AT))
    async with (
        run_echo_servers("a") as (a,),
        run_xds_rig(ports, envoy_process, tls=tls, settings={"xds": {"tls": pki.settings}}) as parts,
    ):
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await parts.wait_for_session()).node == "a"
        assert parts.status.certificate_expires_at == EXPIRES_SOON_AT.timestamp()
        assert len(await dynamic_resources(parts.envoy)) == 3


@pytest.mark.parametrize("held", ["envoy-1", "envoy-2"])
async def test_load_reports_and_counts_come_over_the_same_door(
    tmp_path: Path, envoy_process: StartEnvoy, pki: XdsPki, held: str
) -> None:
    """A real Envoy with the module opens all three streams, and is refused all three."""
    tls = pki.envoy_tls(pki.authority.issue_cert(held))
    async with run_engine(settings(tmp_path, xds={"tls": pki.settings})) as engine:
        bootstrap = render_bootstrap(
            engine.settings,
            control_planes=[f"127.0.0.1:{engine.xds_port}"],
            node_id="envoy-1",
            admin="127.0.0.1:0",
            tls=tls,
            module=str(require_module()),
        )
        envoy = await envoy_process(bootstrap)
        if held == "envoy-1":

            def all_is_told() -> bool:
                told = engine._facts.view()
                return bool(engine.envoys()) and told.loads.keys() == told.module_reports.keys() == {
                    "envoy-1"
                }

            await wait_until(all_is_told)
            return

        async def is_refused_all() -> bool:
            counted = "cluster.tidevoy_control_plane.upstream_rq_total"
            return (await envoy.stats(counted)).get(counted, 0) >= 4  # one of the three came again

        await wait_until(is_refused_all)
        assert engine.envoys() == []
        facts = engine._facts.view()
        assert (facts.loads, facts.module_reports) == ({}, {})


UNFIT: dict[str, Callable[[trustme.CA], trustme.LeafCert | None]] = {
    "no certificate": lambda _: None,
    "another authority": lambda _: trustme.CA().issue_cert("envoy-1"),
    "expired": lambda ours: ours.issue_cert(
        "envoy-1", not_before=EXPIRED_AT, not_after=EXPIRED_AT.replace(year=2002)
    ),
    "another Envoy's": lambda ours: ours.issue_cert("envoy-2"),
}


@pytest.mark.parametrize("unfit", UNFIT)
async def test_an_envoy_without_a_fitting_certificate_gets_nothing(
    ports: Ports, envoy_process: StartEnvoy, pki: XdsPki, unfit: str
) -> None:
    tls = pki.envoy_tls(UNFIT[unfit](pki.authority))
    async with run_xds_rig(ports, envoy_process, tls=tls, settings={"xds": {"tls": pki.settings}}) as parts:
        parts.server.publish(make_plan(make_node_plan("a:4000", "127.0.0.1:4000")))

        async def has_tried_twice() -> bool:
            stats = await parts.envoy.stats("control_plane|tidevoy_control_plane.upstream_(cx|rq)_total")
            tried = "rq" if unfit == "another Envoy's" else "cx"
            return stats.get(f"cluster.tidevoy_control_plane.upstream_{tried}_total", 0) >= 2

        await wait_until(has_tried_twice)
        assert await dynamic_resources(parts.envoy) == []
        assert not await parts.envoy.is_live()
        assert parts.server.statuses() == []
        refusals = [(kind, subject) for kind, subject, _ in parts.events]
        assert refusals == ([("envoy.refused", "envoy-1")] if unfit == "another Envoy's" else [])


# --- every stream, as a client of the protocol ---


class Door:
    """A server with all services that Envoys speak to, and what it took from them."""

    def __init__(self, tls: dict[str, Any]) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.told: list[EnvoyLoad | ModuleReport] = []
        self.ahead = 0.0  # seconds by which the server's clock is ahead
        ours = monotonic_unix_clock()

        def clock() -> float:
            return ours() + self.ahead

        self.settings = Settings.model_validate({"xds": {"listen": "127.0.0.1:0", "tls": tls}})
        known: frozenset[str] = frozenset()
        self.server = XdsServer(
            self.settings,
            clock,
            on_event=lambda *event: self.events.append(event),
            services=[
                LoadReportService(self.told.append, clock, interval=lambda: 1.0).register,
                MetricsService(self.told.append, clock, known_nodes=lambda: known).register,
            ],
        )

    def of_kind(self, kind: str) -> list[tuple[str, str]]:
        return [(subject, message) for each, subject, message in self.events if each == kind]

    @contextlib.asynccontextmanager
    async def channel(self, known_by: grpc.ChannelCredentials) -> AsyncIterator[grpc.aio.Channel]:
        alone = (("grpc.use_local_subchannel_pool", 1),)
        target = f"127.0.0.1:{self.server.port}"
        async with grpc.aio.secure_channel(target, known_by, options=alone) as channel:
            yield channel

    async def ends(self, known_by: grpc.ChannelCredentials, envoy: str = "envoy-1") -> grpc.StatusCode:
        """How a stream ends that asks for clusters; OK: it is answered."""
        async with self.channel(known_by) as channel:
            call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(timeout=10)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.write(asking(envoy))
                assert (await call.read()).type_url == CLUSTER.url
                return grpc.StatusCode.OK
            return await call.code()


def asking(envoy: str) -> discovery_pb2.DiscoveryRequest:
    request = discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url)
    request.node.id = envoy
    return request


@contextlib.asynccontextmanager
async def door(tls: dict[str, Any]) -> AsyncIterator[Door]:
    opened = Door(tls)
    await opened.server.start()
    try:
        opened.server.publish(make_plan())
        yield opened
    finally:
        await opened.server.stop()


def first_messages(envoy: str) -> dict[str, list[bytes]]:
    """What an Envoy says at the beginning of each stream, so that something of it would be used."""
    delta = discovery_pb2.DeltaDiscoveryRequest(type_url=CLUSTER.url)
    report = lrs_pb2.LoadStatsRequest()
    delta.node.id = report.node.id = envoy
    return {
        f"{_ADS}/StreamAggregatedResources": [asking(envoy).SerializeToString()],
        f"{_ADS}/DeltaAggregatedResources": [delta.SerializeToString()],
        _LOADS: [report.SerializeToString()] * 2,
        _METRICS: [metrics_message(module_info_family(), envoy=envoy)],
    }


@pytest.mark.parametrize("method", first_messages(""), ids=lambda method: method.rpartition("/")[2])
async def test_no_stream_is_heard_under_another_envoys_name(pki: XdsPki, method: str) -> None:
    known_by = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-2"))
    async with door(pki.settings) as opened, opened.channel(known_by) as channel:
        call: Any = channel.stream_stream(method)(timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for each in first_messages("envoy-1")[method]:
                await call.write(each)
        assert await call.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "it is envoy-1 (node.id), but its certificate is that of envoy-2;" in await call.details()
        assert (opened.told, opened.server.statuses()) == ([], [])
        ((subject, told),) = opened.of_kind("envoy.refused")
        assert subject == "envoy-1"
        assert told.startswith("127.0.0.1:")
        assert await call.details() in told

        mine: Any = channel.stream_stream(method)(timeout=10)
        for each in first_messages("envoy-2")[method]:
            await mine.write(each)
        await wait_until(lambda: bool(opened.told or opened.server.statuses()))
        mine.cancel()


async def test_only_a_certificate_of_the_client_ca_opens_the_door(pki: XdsPki) -> None:
    async with door(pki.settings) as opened:
        for leaf in (None, trustme.CA().issue_cert("envoy-1")):
            assert await opened.ends(channel_credentials(pki.authority, leaf)) == grpc.StatusCode.UNAVAILABLE
        assert (opened.events, opened.server.statuses()) == ([], [])


async def test_where_an_id_may_stand(pki: XdsPki) -> None:
    right, wrong = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    async with door(pki.settings) as opened:
        alone = pki.authority.issue_cert(common_name="envoy-1")
        beside = pki.authority.issue_cert("other.test", common_name="envoy-1")
        several = pki.authority.issue_cert("other.test", "envoy-1")
        spiffe = channel_credentials_with_uri(pki.authority, "spiffe://tidb.test/envoys/envoy-1")
        assert await opened.ends(channel_credentials(pki.authority, alone)) == right
        assert await opened.ends(channel_credentials(pki.authority, beside)) == wrong
        assert await opened.ends(channel_credentials(pki.authority, several)) == right
        assert await opened.ends(spiffe) == right
        assert await opened.ends(spiffe, "common") == wrong
        assert await opened.ends(spiffe, "spiffe://tidb.test/envoys/envoy-1") == wrong


async def test_a_certificate_can_be_good_for_every_id(pki: XdsPki) -> None:
    shared = channel_credentials(pki.authority, pki.authority.issue_cert("all-envoys"))
    async with door(pki.settings | {"identity": "any"}) as opened:
        assert await opened.ends(shared) == grpc.StatusCode.OK
        strict = Settings.model_validate({"xds": {"listen": "127.0.0.1:0", "tls": pki.settings}})
        opened.server.configure(strict)
        assert await opened.ends(shared) == grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_client_ca_nobody_is_asked(pki: XdsPki) -> None:
    tls = {name: pki.settings[name] for name in ("cert", "key")}
    async with door(tls) as opened:
        assert await opened.ends(channel_credentials(pki.authority, None)) == grpc.StatusCode.OK


# --- certificates that change ---


async def test_new_certificates_are_used_without_a_restart_and_no_stream_ends(pki: XdsPki) -> None:
    old = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-1"))
    async with door(pki.settings) as opened, opened.channel(old) as channel:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources()
        await call.write(asking("envoy-1"))
        await call.read()

        pki.authority = trustme.CA()
        new = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-2"))
        issued = pki.issue()
        pki.write_file("client_ca", pki.authority.cert_pem.bytes())
        pki.write_file("key", issued.private_key_pem.bytes())
        pki.write_file("cert", issued.cert_chain_pems[0].bytes())
        await wait_until(lambda: bool(opened.of_kind("xds.certificates")))

        assert await opened.ends(new, "envoy-2") == grpc.StatusCode.OK
        assert await opened.ends(old) == grpc.StatusCode.UNAVAILABLE
        opened.server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000")))
        request = discovery_pb2.DiscoveryRequest(
            type_url="type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            resource_names=["tidb"],
        )
        await call.write(request)
        assert len((await asyncio.wait_for(call.read(), 5)).resources) == 1
        assert opened.of_kind("xds.certificates_rejected") == []
        call.cancel()


async def test_a_session_is_not_resumed_for_long(pki: XdsPki) -> None:
    """It shows no certificate, so nobody would see that this has ended."""
    leaf = pki.authority.issue_cert("envoy-1")
    mine = pki.envoy_tls(leaf)
    assert mine.cert
    context = ssl.create_default_context(cafile=mine.ca)
    context.load_cert_chain(mine.cert, mine.key)
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose tickets come with the handshake

    def resume(port: int, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure,
        ):
            assert secure.session is not None
            return bool(secure.session_reused), secure.session

    async with door(pki.settings) as opened:
        port = opened.server.port
        _, session = await asyncio.to_thread(resume, port, None)
        assert (await asyncio.to_thread(resume, port, session))[0]
        opened.ahead += 61
        assert not (await asyncio.to_thread(resume, port, session))[0]


async def test_files_that_cannot_be_used_change_nothing_and_are_told_of_once(pki: XdsPki) -> None:
    mine = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-1"))
    async with door(pki.settings) as opened:
        pki.write_file("key", pki.issue().private_key_pem.bytes())
        await wait_until(lambda: bool(opened.of_kind("xds.certificates_rejected")))
        ((_, told),) = opened.of_kind("xds.certificates_rejected")
        assert told.startswith("the old certificates stay in use: the key in ")
        assert "does not belong to the certificate" in told
        assert await opened.ends(mine) == grpc.StatusCode.OK
        pki.remove_file("cert")
        await wait_until(lambda: len(opened.of_kind("xds.certificates_rejected")) == 2)
        assert "cannot be read: No such file" in opened.of_kind("xds.certificates_rejected")[1][1]
        issued = pki.issue()
        pki.write_file("key", issued.private_key_pem.bytes())
        pki.write_file("cert", issued.cert_chain_pems[0].bytes())
        await wait_until(lambda: bool(opened.of_kind("xds.certificates")))
        assert await opened.ends(mine) == grpc.StatusCode.OK


async def test_files_that_stay_unusable_are_told_of_again(pki: XdsPki) -> None:
    tls = XdsTls.model_validate(pki.settings)
    now = 1000.0
    told: list[tuple[str, str, str]] = []
    certificates = ServerCertificates(tls, lambda: now, lambda *event: told.append(event))
    pki.write_file("key", pki.issue().private_key_pem.bytes())
    for later, count in ((0.0, 0), (1.0, 1), (3599.0, 1), (3601.0, 2), (3602.0, 2)):
        now = 1000.0 + later
        await certificates.refresh()
        assert len(told) == count
