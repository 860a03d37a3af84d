"""Certificates expire under load: of the servers, of an Envoy, and of TiDB's session tokens."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import pytest
import trustme

from bench.migration.rolling_restart import parse_samples
from controlplane.xds.bootstrap import module_path
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap
from sandbox.control_plane import ControlPlaneProcess
from sandbox.local_cluster import LocalCluster
from sandbox.server import launch_all
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.controlplane.api_server import stored_events
from tests.support.controlplane.cli_process import CliResult, start_tidevoy, wait_for_result
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.expiring_certificates import (
    LONG_SECONDS,
    CertificateFiles,
    wait_for_time,
    write_session_certificate,
)
from tests.support.tidb.node_operations import drain, migration_counts, undrain
from tests.support.tidb.sessions import TrackedSessions, connect, query_rows, query_value, session_port
from tests.support.waiting import assert_never, wait_until

VALID_SECONDS = 30.0
"""Enough to start a control plane and an Envoy with these certificates."""
RELOADED_VALID_SECONDS = 6.0
"""Enough to load renewed files, which are checked at least every second."""
REFUSED_SECONDS = 3.0
"""An Envoy tries to connect again at least every 2 s."""
_IDLE_SESSIONS = 6


class HttpsControlPlane(ControlPlaneProcess):
    """A control plane with `api.tls`."""

    @property
    def api_url(self) -> str:
        return super().api_url.replace("http:", "https:", 1)


@dataclass
class TlsStack:
    """A stack with TLS at all ports. `sql`, `api` and `xds` are the certificates of servers."""

    stack: LocalCluster
    ca: Path
    authority: trustme.CA
    sql: CertificateFiles
    api: CertificateFiles
    xds: CertificateFiles
    envoy: CertificateFiles

    def verifying(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    def log_in(self, context: ssl.SSLContext) -> str:
        """Log in with TLS, and return the client's error, or nothing."""
        try:
            connect(self.stack.sql_port, ssl=context).close()
            return ""
        except pymysql.err.OperationalError as error:
            return f"{error.args[0]}: {error.args[1]}"

    async def run_cli(self, *arguments: str) -> CliResult:
        process = await start_tidevoy(self.stack.control_plane.api_url, *arguments, TIDEVOY_CA=str(self.ca))
        return await wait_for_result(process)

    async def is_envoy_connected(self) -> bool:
        """Return whether the control plane has accepted a stream of the Envoy.

        The Envoy itself counts as connected as soon as it tries.
        """
        envoys = (await self.stack.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        return any(envoy["connected_since"] is not None for envoy in envoys)

    async def expiry(self, metric: str) -> dict[str, float]:
        """Return the expiry times of a metric, by setting or Envoy."""
        page = (await self.stack.api.get("/metrics")).raise_for_status().text
        return {next(iter(sample.labels.values())): sample.value for sample in parse_samples(page, metric)}


@asynccontextmanager
async def run_tls_stack(
    directory: Path, cluster: TidbCluster, valid_seconds: Mapping[str, float]
) -> AsyncIterator[TlsStack]:
    """Run a stack. `valid_seconds`: how long certificates are valid from their first use on."""
    authority, ca = trustme.CA(), directory / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    files = {
        name: CertificateFiles(authority, directory, name, "envoy-1" if name == "envoy" else "127.0.0.1")
        for name in ("sql", "api", "xds", "envoy")
    }
    settings: dict[str, Any] = {
        "tls": {"client": {"mode": "optional", **files["sql"].settings}},
        "api": {"tls": files["api"].settings},
        "rebalance": {"enabled": False},
    }
    async with LocalCluster.start(
        directory / "stack", cluster=cluster, settings=settings, control_plane=HttpsControlPlane
    ) as stack:
        # LocalCluster starts without TLS at the xDS port.
        control_plane, xds = stack.control_plane, stack.control_plane.settings["xds"]
        xds_tls = {**files["xds"].settings, "client_ca": str(ca)}
        control_plane.settings = {**control_plane.settings, "xds": {**xds, "tls": xds_tls}}
        stack.envoy.bootstrap = render_bootstrap(
            control_plane.parsed_settings(),
            control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
            node_id="envoy-1",
            admin=f"127.0.0.1:{stack.advertised.admin}",
            module=str(module_path.find_module()),
            tls=ControlPlaneTls(str(ca), "127.0.0.1", str(files["envoy"].cert), str(files["envoy"].key)),
        )
        await stack.envoy.terminate()
        for name, seconds in valid_seconds.items():
            files[name].renew(seconds)
        await crash_control_plane(stack)
        await stack.envoy.launch()
        await stack.wait_until(lambda: stack.is_in_service(len(stack.tidb)), "active nodes", 30.0)
        for name in valid_seconds:
            assert time.time() < files[name].expires_at, f"the certificate {name!r} expired during the start"
        yield TlsStack(stack, ca, authority, **files)
        assert stack.violations() == []
        assert stack.bugs() == []


@pytest.fixture
async def expiring_nodes(cluster: TidbCluster, tmp_path: Path) -> tuple[list[Tidb], float]:
    """Start two TiDB servers that sign tokens with a certificate that expires; return also its end."""
    expires_at = time.time() + VALID_SECONDS
    shared, cluster.certificate = (
        cluster.certificate,
        write_session_certificate(tmp_path / "tokens", expires_at),
    )
    try:
        nodes = [cluster.new_node() for _ in range(2)]
    finally:
        cluster.certificate = shared
    await launch_all(nodes)
    assert time.time() < expires_at, "the certificate of tokens expired during the start"
    return nodes, expires_at


@pytest.mark.timeout(240)
async def test_expired_server_certificates_stop_only_what_verifies_them(
    cluster: TidbCluster, database: str, expiring_nodes: tuple[list[Tidb], float], tmp_path: Path
) -> None:
    (node, target), tokens_expire_at = expiring_nodes
    others = [server for server in cluster.tidb if server not in (node, target)]
    async with run_tls_stack(tmp_path, cluster, {"xds": VALID_SECONDS}) as tls:
        stack = tls.stack
        async with asyncio.TaskGroup() as drains:
            for other in others:  # They know another certificate for tokens.
                drains.create_task(drain(stack, other))
        with closing(TrackedSessions(stack, database)) as sessions:
            idle = [sessions.on_node(node, ssl=tls.verifying()) for _ in range(_IDLE_SESSIONS)]
            for number, session in enumerate(idle):
                query_rows(session, f"set @number = {number}")
            async with DrillLoad(stack.sql_port, database, clients=4, statements_per_second=40) as load:
                assert (await tls.run_cli("nodes")).exit_code == 0
                for files in (tls.sql, tls.api):
                    files.renew(RELOADED_VALID_SECONDS)
                await wait_until(lambda: has_event(stack, "api.certificates_reloaded"))
                expiry = await tls.expiry("tidevoy_certificate_expiry_timestamp_seconds")
                assert expiry["xds.tls.cert"] == tls.xds.expires_at
                assert expiry["api.tls.cert"] == tls.api.expires_at
                for files in (tls.sql, tls.api, tls.xds):
                    await files.wait_until_expired()
                await wait_for_time(tokens_expire_at)

                # The drain reaches the Envoy over its open stream, and TiDB accepts the tokens.
                assert [query_value(session, "select @number") for session in idle] == list(
                    range(_IDLE_SESSIONS)
                )
                await drain(stack, node)
                assert {session_port(session) for session in idle} == {target.port}
                migrations = await migration_counts(stack)
                assert {result for _, result, _ in migrations} == {"moved"}

                await wait_until(lambda: "expired" in tls.log_in(tls.verifying()))
                sql_error, cli_error = tls.log_in(tls.verifying()), await tls.run_cli("nodes")
                assert "certificate has expired" in sql_error
                assert cli_error.exit_code == 1
                assert len(cli_error.stderr.splitlines()) == 1
                assert "certificate has expired" in cli_error.stderr
                unverified = ssl.create_default_context()
                unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
                assert tls.log_in(unverified) == ""

                # A restarted control plane serves, but the Envoy refuses it and keeps its configuration.
                await crash_control_plane(stack)
                await assert_never(tls.is_envoy_connected, REFUSED_SECONDS)
                assert (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).is_success
                assert {session_port(sessions.through_envoy()) for _ in range(4)} == {target.port}
                refusals = last_stream_error(stack)
                assert "certificate" in refusals

                renewed_at = time.monotonic()
                for files in (tls.sql, tls.api, tls.xds):
                    files.renew(LONG_SECONDS)
                await wait_until(lambda: tls.log_in(tls.verifying()) == "")
                sql_seconds = time.monotonic() - renewed_at
                await wait_until(tls.is_envoy_connected)
                xds_seconds = time.monotonic() - renewed_at
                assert (await tls.run_cli("nodes")).exit_code == 0
                assert await has_event(stack, "xds.certificates_reloaded")
                await undrain(stack, node)
                await wait_until(lambda: session_port(sessions.through_envoy()) == node.port)
            assert [query_value(session, "select @number") for session in idle] == list(range(_IDLE_SESSIONS))
    print(
        f"\ndrill expired_certificates: servers and tokens: {load.statements} statements,"
        f" {len(load.errors)} errors, slowest {load.slowest_seconds:.2f} s;"
        f" {sum(migrations.values())} migrations with the expired certificate of tokens, all moved;"
        f" after the renewal a SQL client logs in within {sql_seconds:.1f} s, the Envoy connects within"
        f" {xds_seconds:.1f} s"
        f"\n  SQL client: {sql_error}\n  command line: {cli_error.stderr.strip()}\n  Envoy: {refusals}"
    )
    assert load.errors == []


async def has_event(stack: LocalCluster, kind: str) -> bool:
    return any(event["kind"] == kind for event in await stored_events(stack.api))


async def crash_control_plane(stack: LocalCluster) -> None:
    """End all streams of the Envoy, and let the control plane start with the files as they are now."""
    await stack.control_plane.kill()
    await stack.control_plane.launch()


def last_stream_error(stack: LocalCluster) -> str:
    """Return why Envoy has no stream to the control plane, from its log."""
    lines = [line for line in stack.envoy.process.output().splitlines() if "config stream" in line]
    return lines[-1] if lines else "no line in the log"


@pytest.mark.timeout(240)
async def test_envoy_with_an_expired_certificate_keeps_its_configuration(
    cluster: TidbCluster, database: str, tmp_path: Path
) -> None:
    node, *others = cluster.tidb
    async with run_tls_stack(tmp_path, cluster, {"envoy": VALID_SECONDS}) as tls:
        stack = tls.stack
        with closing(TrackedSessions(stack, database)) as sessions:
            idle = [sessions.on_node(node) for _ in range(_IDLE_SESSIONS)]
            async with DrillLoad(stack.sql_port, database, clients=4, statements_per_second=40) as load:
                expiry = await tls.expiry("tidevoy_envoy_certificate_expiry_timestamp_seconds")
                assert expiry == {"envoy-1": tls.envoy.expires_at}
                await tls.envoy.wait_until_expired()
                await drain(stack, node)
                assert node.port not in {session_port(session) for session in idle}

                await crash_control_plane(stack)
                await assert_never(tls.is_envoy_connected, REFUSED_SECONDS)
                assert (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).is_success
                ports = {session_port(sessions.through_envoy()) for _ in range(8)}
                assert ports <= {other.port for other in others}
                refusals = last_stream_error(stack)
                # An Envoy reads its certificate only when it starts.
                tls.envoy.renew(LONG_SECONDS)
                await assert_never(tls.is_envoy_connected, REFUSED_SECONDS)
                await load.wait_for_statements()
            assert all(query_value(session, "select 1") == 1 for session in idle)
        await stack.envoy.restart()
        await wait_until(tls.is_envoy_connected)
        await undrain(stack, node)
        await stack.wait_until(lambda: stack.is_in_service(len(stack.tidb)), "active nodes", 30.0)
        with closing(TrackedSessions(stack, database)) as sessions:
            sessions.on_node(node)
        expiry = await tls.expiry("tidevoy_envoy_certificate_expiry_timestamp_seconds")
        assert expiry == {"envoy-1": tls.envoy.expires_at}
    print(
        f"\ndrill expired_certificates: Envoy: {load.statements} statements, {len(load.errors)} errors,"
        f" slowest {load.slowest_seconds:.2f} s; Envoy: {refusals}"
    )
    assert load.errors == []
