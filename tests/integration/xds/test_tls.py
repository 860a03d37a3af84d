"""TLS between Envoys and the control plane: authorization by certificate, and changed certificates."""

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
from controlplane.config.own_tls import XdsTls
from controlplane.config.settings import Settings
from controlplane.grpc_auth import XdsPortService
from controlplane.model.facts import EnvoyLoad
from controlplane.model.statements import StatementReport
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.envoy_reports.statement_reports import StatementReportService
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from controlplane.xds.resource_type import CLUSTER
from controlplane.xds.server_certificates import ServerCertificates
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.engine import run_engine, settings
from tests.support.controlplane.running_xds import RecordedEvents, make_xds_server, run_xds_server
from tests.support.controlplane.statement_reports import METHOD, report_message, row
from tests.support.controlplane.telemetry_messages import metrics_message, module_info_family
from tests.support.controlplane.xds_certificates import (
    EXPIRED_AT,
    EXPIRES_SOON_AT,
    XdsPki,
    channel_credentials,
    channel_credentials_with_uri,
)
from tests.support.controlplane.xds_server import (
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
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
    """Return a text for each resource that an Envoy has from its control plane."""
    dump = (await envoy.get("/config_dump?include_eds")).json()
    keys = {"dynamic_listeners", "dynamic_active_clusters", "dynamic_warming_clusters"}
    resources = [
        f"{key} {item}" for part in dump["configs"] for key in keys & part.keys() for item in part[key]
    ]
    # Static endpoints are left out: the bootstrap sets them, for the connection to the control plane.
    endpoints = [part.get("dynamic_endpoint_configs", []) for part in dump["configs"]]
    return resources + [f"endpoints {item}" for part in endpoints for item in part]


async def test_envoy_with_valid_certificate_gets_all_resources(
    ports: Ports, envoy_process: StartEnvoy, pki: XdsPki
) -> None:
    tls = pki.envoy_tls(pki.authority.issue_cert("envoy-1", not_after=EXPIRES_SOON_AT))
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, tls=tls, settings={"xds": {"tls": pki.settings}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await test_bed.wait_for_session()).node == "a"
        assert test_bed.status.certificate_expires_at == EXPIRES_SOON_AT.timestamp()
        assert len(await dynamic_resources(test_bed.envoy)) == 3


@pytest.mark.parametrize("certificate_name", ["envoy-1", "envoy-2"])
async def test_load_reports_and_metrics_are_authorized_like_ads(
    tmp_path: Path, envoy_process: StartEnvoy, pki: XdsPki, certificate_name: str
) -> None:
    """A real Envoy with the module opens three streams. The server accepts all or denies all."""
    tls = pki.envoy_tls(pki.authority.issue_cert(certificate_name))
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
        if certificate_name == "envoy-1":

            def all_streams_reported() -> bool:
                facts = engine._facts.view()
                return bool(
                    engine.cluster.envoys()
                ) and facts.loads.keys() == facts.module_reports.keys() == {"envoy-1"}

            await wait_until(all_streams_reported)
            return

        async def all_streams_denied() -> bool:
            counter = "cluster.tidevoy_control_plane.upstream_rq_total"
            # More requests than streams: Envoy has retried a denied stream.
            return (await envoy.stats(counter)).get(counter, 0) >= 4

        await wait_until(all_streams_denied)
        assert engine.cluster.envoys() == []
        facts = engine._facts.view()
        assert (facts.loads, facts.module_reports) == ({}, {})


INVALID_CERTIFICATES: dict[str, Callable[[trustme.CA], trustme.LeafCert | None]] = {
    "no certificate": lambda _: None,
    "another authority": lambda _: trustme.CA().issue_cert("envoy-1"),
    "expired": lambda authority: authority.issue_cert(
        "envoy-1", not_before=EXPIRED_AT, not_after=EXPIRED_AT.replace(year=2002)
    ),
    "another Envoy's": lambda authority: authority.issue_cert("envoy-2"),
}


@pytest.mark.parametrize("case", INVALID_CERTIFICATES)
async def test_envoy_with_invalid_certificate_gets_nothing(
    ports: Ports, envoy_process: StartEnvoy, pki: XdsPki, case: str
) -> None:
    tls = pki.envoy_tls(INVALID_CERTIFICATES[case](pki.authority))
    async with run_xds_test_bed(
        ports, envoy_process, tls=tls, settings={"xds": {"tls": pki.settings}}
    ) as test_bed:
        test_bed.server.publish(make_plan(make_node_plan("a:4000", "127.0.0.1:4000")))

        async def has_tried_twice() -> bool:
            stats = await test_bed.envoy.stats("control_plane|tidevoy_control_plane.upstream_(cx|rq)_total")
            kind = "rq" if case == "another Envoy's" else "cx"
            return stats.get(f"cluster.tidevoy_control_plane.upstream_{kind}_total", 0) >= 2

        await wait_until(has_tried_twice)
        assert await dynamic_resources(test_bed.envoy) == []
        assert not await test_bed.envoy.is_live()
        assert test_bed.server.statuses() == []
        denials = [(kind, subject) for kind, subject, _ in test_bed.events]
        assert denials == ([("envoy.denied", "envoy-1")] if case == "another Envoy's" else [])


# --- every stream, with a protocol client ---


class XdsEndpoint:
    """A server with all services for Envoys; records events and reports."""

    def __init__(self, tls: dict[str, Any]) -> None:
        event_log = RecordedEvents()
        self.events = event_log.recorded
        self.reports: list[EnvoyLoad | ModuleReport] = []
        self.statements: list[StatementReport] = []
        self.clock_offset = 0.0  # seconds by which the server's clock is ahead
        real_clock = monotonic_unix_clock()

        def clock() -> float:
            return real_clock() + self.clock_offset

        self.settings = Settings.model_validate({"xds": {"listen": "127.0.0.1:0", "tls": tls}})
        known_nodes: frozenset[str] = frozenset()
        services: list[XdsPortService] = [
            LoadReportService(self.reports.append, clock, interval=lambda: 1.0),
            MetricsService(self.reports.append, clock, known_nodes=lambda: known_nodes),
            StatementReportService(self.statements.append, clock, envoy_of=lambda _: "envoy-1"),
        ]
        self.server = make_xds_server(self.settings, event_log, services, clock)

    def of_kind(self, kind: str) -> list[tuple[str, str]]:
        return [(subject, message) for event_kind, subject, message in self.events if event_kind == kind]

    @contextlib.asynccontextmanager
    async def channel(self, credentials: grpc.ChannelCredentials) -> AsyncIterator[grpc.aio.Channel]:
        options = (("grpc.use_local_subchannel_pool", 1),)
        target = f"127.0.0.1:{self.server.port}"
        async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
            yield channel

    async def stream_status(
        self, credentials: grpc.ChannelCredentials, envoy: str = "envoy-1"
    ) -> grpc.StatusCode:
        """Subscribe to clusters; return OK if a response arrives, otherwise the status of the stream."""
        async with self.channel(credentials) as channel:
            call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(timeout=10)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.write(cluster_request(envoy))
                assert (await call.read()).type_url == CLUSTER.url
                return grpc.StatusCode.OK
            return await call.code()


def cluster_request(envoy: str) -> discovery_pb2.DiscoveryRequest:
    request = discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url)
    request.node.id = envoy
    return request


@contextlib.asynccontextmanager
async def run_endpoint(tls: dict[str, Any]) -> AsyncIterator[XdsEndpoint]:
    endpoint = XdsEndpoint(tls)
    async with run_xds_server(endpoint.server):
        endpoint.server.publish(make_plan())
        yield endpoint


def first_messages(envoy: str) -> dict[str, list[bytes]]:
    """Return, for each method, the first messages of an Envoy's stream, as many as the server needs."""
    delta = discovery_pb2.DeltaDiscoveryRequest(type_url=CLUSTER.url)
    report = lrs_pb2.LoadStatsRequest()
    delta.node.id = report.node.id = envoy
    return {
        f"{_ADS}/StreamAggregatedResources": [cluster_request(envoy).SerializeToString()],
        f"{_ADS}/DeltaAggregatedResources": [delta.SerializeToString()],
        _LOADS: [report.SerializeToString()] * 2,
        _METRICS: [metrics_message(module_info_family(), envoy=envoy)],
    }


@pytest.mark.parametrize("method", first_messages(""), ids=lambda method: method.rpartition("/")[2])
async def test_denies_every_stream_with_another_envoys_id(pki: XdsPki, method: str) -> None:
    credentials = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-2"))
    async with run_endpoint(pki.settings) as endpoint, endpoint.channel(credentials) as channel:
        call: Any = channel.stream_stream(method)(timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The first message has the id. A write after the denial could change the status to INTERNAL.
            await call.write(first_messages("envoy-1")[method][0])
        assert await call.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "node.id is envoy-1, but its certificate is for envoy-2;" in await call.details()
        assert (endpoint.reports, endpoint.server.statuses()) == ([], [])
        ((subject, event_text),) = endpoint.of_kind("envoy.denied")
        assert subject == "envoy-1"
        assert "from 127.0.0.1:" in event_text
        assert await call.details() in event_text

        own_call: Any = channel.stream_stream(method)(timeout=10)
        for message in first_messages("envoy-2")[method]:
            await own_call.write(message)
        await wait_until(lambda: bool(endpoint.reports or endpoint.server.statuses()))
        own_call.cancel()


async def test_denies_statements_of_another_envoys_process(pki: XdsPki) -> None:
    data = report_message(row()).SerializeToString()
    async with run_endpoint(pki.settings) as endpoint:
        for name, expected in (("envoy-2", "PERMISSION_DENIED"), ("envoy-1", "OK")):
            credentials = channel_credentials(pki.authority, pki.authority.issue_cert(name))
            async with endpoint.channel(credentials) as channel:
                call: Any = channel.unary_unary(METHOD)(data, timeout=10)
                assert (await call.code()).name == expected
            assert len(endpoint.statements) == (expected == "OK")
        assert [subject for subject, _ in endpoint.of_kind("envoy.denied")] == ["envoy-1"]


async def test_requires_certificate_of_client_ca(pki: XdsPki) -> None:
    async with run_endpoint(pki.settings) as endpoint:
        for leaf in (None, trustme.CA().issue_cert("envoy-1")):
            assert (
                await endpoint.stream_status(channel_credentials(pki.authority, leaf))
                == grpc.StatusCode.UNAVAILABLE
            )
        assert (endpoint.events, endpoint.server.statuses()) == ([], [])


async def test_reads_id_from_dns_name_or_uri_else_from_common_name(pki: XdsPki) -> None:
    authorized, denied = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    async with run_endpoint(pki.settings) as endpoint:
        common_name_only = pki.authority.issue_cert(common_name="envoy-1")
        common_and_dns_name = pki.authority.issue_cert("other.test", common_name="envoy-1")
        two_dns_names = pki.authority.issue_cert("other.test", "envoy-1")
        spiffe = channel_credentials_with_uri(pki.authority, "spiffe://tidb.test/envoys/envoy-1")
        assert (
            await endpoint.stream_status(channel_credentials(pki.authority, common_name_only)) == authorized
        )
        assert await endpoint.stream_status(channel_credentials(pki.authority, common_and_dns_name)) == denied
        assert await endpoint.stream_status(channel_credentials(pki.authority, two_dns_names)) == authorized
        assert await endpoint.stream_status(spiffe) == authorized
        assert await endpoint.stream_status(spiffe, "common") == denied
        assert await endpoint.stream_status(spiffe, "spiffe://tidb.test/envoys/envoy-1") == denied


async def test_unverified_node_id_authorizes_every_id(pki: XdsPki) -> None:
    shared = channel_credentials(pki.authority, pki.authority.issue_cert("all-envoys"))
    async with run_endpoint(pki.settings | {"verify_node_id": False}) as endpoint:
        assert await endpoint.stream_status(shared) == grpc.StatusCode.OK
        strict = Settings.model_validate({"xds": {"listen": "127.0.0.1:0", "tls": pki.settings}})
        endpoint.server.configure(strict)
        assert await endpoint.stream_status(shared) == grpc.StatusCode.PERMISSION_DENIED


async def test_without_client_ca_no_certificate_is_needed(pki: XdsPki) -> None:
    tls = {name: pki.settings[name] for name in ("cert", "key")}
    async with run_endpoint(tls) as endpoint:
        assert await endpoint.stream_status(channel_credentials(pki.authority, None)) == grpc.StatusCode.OK


# --- certificates that change ---


async def test_reloads_certificates_without_ending_streams(pki: XdsPki) -> None:
    old = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-1"))
    async with run_endpoint(pki.settings) as endpoint, endpoint.channel(old) as channel:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources()
        await call.write(cluster_request("envoy-1"))
        await call.read()

        pki.authority = trustme.CA()
        new = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-2"))
        issued = pki.issue()
        pki.write_file("client_ca", pki.authority.cert_pem.bytes())
        pki.write_file("key", issued.private_key_pem.bytes())
        pki.write_file("cert", issued.cert_chain_pems[0].bytes())
        await wait_until(lambda: bool(endpoint.of_kind("xds.certificates_reloaded")))

        assert await endpoint.stream_status(new, "envoy-2") == grpc.StatusCode.OK
        assert await endpoint.stream_status(old) == grpc.StatusCode.UNAVAILABLE
        endpoint.server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000")))
        request = discovery_pb2.DiscoveryRequest(
            type_url="type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            resource_names=["tidb"],
        )
        await call.write(request)
        assert len((await asyncio.wait_for(call.read(), 5)).resources) == 1
        assert endpoint.of_kind("xds.certificates_rejected") == []
        call.cancel()


async def test_tls_session_cannot_be_resumed_after_a_minute(pki: XdsPki) -> None:
    """A client that resumes a session sends no certificate, so the server could not check its expiry."""
    leaf = pki.authority.issue_cert("envoy-1")
    envoy_tls = pki.envoy_tls(leaf)
    assert envoy_tls.cert
    context = ssl.create_default_context(cafile=envoy_tls.ca)
    context.load_cert_chain(envoy_tls.cert, envoy_tls.key)
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # its handshake includes the session ticket

    def resume(port: int, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure,
        ):
            assert secure.session is not None
            return bool(secure.session_reused), secure.session

    async with run_endpoint(pki.settings) as endpoint:
        port = endpoint.server.port
        _, session = await asyncio.to_thread(resume, port, None)
        assert (await asyncio.to_thread(resume, port, session))[0]
        endpoint.clock_offset += 61
        assert not (await asyncio.to_thread(resume, port, session))[0]


async def test_keeps_old_certificates_and_reports_unusable_files_once(pki: XdsPki) -> None:
    credentials = channel_credentials(pki.authority, pki.authority.issue_cert("envoy-1"))
    async with run_endpoint(pki.settings) as endpoint:
        pki.write_file("key", pki.issue().private_key_pem.bytes())
        await wait_until(lambda: bool(endpoint.of_kind("xds.certificates_rejected")))
        ((_, event_text),) = endpoint.of_kind("xds.certificates_rejected")
        assert event_text.startswith("the old certificates stay in use: the key in ")
        assert "does not match the certificate" in event_text
        assert await endpoint.stream_status(credentials) == grpc.StatusCode.OK
        pki.remove_file("cert")
        await wait_until(lambda: len(endpoint.of_kind("xds.certificates_rejected")) == 2)
        assert "cannot be read: No such file" in endpoint.of_kind("xds.certificates_rejected")[1][1]
        issued = pki.issue()
        pki.write_file("key", issued.private_key_pem.bytes())
        pki.write_file("cert", issued.cert_chain_pems[0].bytes())
        await wait_until(lambda: bool(endpoint.of_kind("xds.certificates_reloaded")))
        assert await endpoint.stream_status(credentials) == grpc.StatusCode.OK


async def test_reports_unusable_files_again_after_an_hour(pki: XdsPki) -> None:
    tls = XdsTls.model_validate(pki.settings)
    now = 1000.0
    events: list[tuple[str, str, str]] = []
    certificates = ServerCertificates(tls, lambda: now, lambda *event: events.append(event))
    pki.write_file("key", pki.issue().private_key_pem.bytes())
    for later, count in ((0.0, 0), (1.0, 1), (3599.0, 1), (3601.0, 2), (3602.0, 2)):
        now = 1000.0 + later
        await certificates.refresh()
        assert len(events) == count
