"""The port at which an Envoy tells load balancers whether it is alive and ready."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import accepts_connections, http_client
from tests.support.clients.server import PemFiles
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import counting_client, run_cluster
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

PROBES = 100_000
MAX_GROWTH_BYTES = 1 << 20
READY = (200, "ready\n")
_REQUEST = b"GET /readyz HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n"
# That of HAProxy's `option httpchk GET /readyz`.
_HTTP_1_0_REQUEST = b"GET /readyz HTTP/1.0\r\n\r\n"


class HealthPort:
    """Client of the health port of the cluster's Envoy."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a response."""
        response = await self._client.get(path)
        return response.status_code, response.text

    async def wait_until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.get("/readyz"))[0] == 200

        await wait_until(is_ready)

    async def wait_for_reason(self, reason: str) -> None:
        """Wait until `/readyz` answers 503 with this reason."""

        async def has_reason() -> bool:
            status, text = await self.get("/readyz")
            return status == 503 and reason in text

        await wait_until(has_reason)


@asynccontextmanager
async def run_probed_cluster(
    directory: Path, mariadb: MariaDb, *, nodes: int = 1, module: bool = True
) -> AsyncIterator[tuple[LocalCluster, HealthPort]]:
    with Ports() as ports:
        address = f"127.0.0.1:{ports.allocate()}"
        settings = {"envoy_health": {"listen": address}}
        async with (
            run_cluster(directory, mariadb, nodes=nodes, settings=settings, module=module) as stack,
            http_client(f"http://{address}") as client,
        ):
            yield stack, HealthPort(client)


async def test_operator_sets_an_envoy_to_not_ready(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_probed_cluster(tmp_path, mariadb) as (stack, health):
        assert await health.get("/readyz") == READY
        url = stack.control_plane.api_url
        changed = await run_tidevoy(url, "envoys", "not-ready", "envoy-1")
        assert changed.stdout == "envoy-1 is not ready for new clients\n"
        await health.wait_for_reason("an operator has set it to not ready")
        assert "; not ready (set by an operator)" in (await run_tidevoy(url, "envoys")).stdout
        async with counting_client(stack.sql_port) as client:  # clients that still come are served
            assert error_code(await client.log_in()) == 0
        await run_tidevoy(url, "envoys", "ready", "envoy-1")
        await health.wait_until_ready()


@pytest.mark.parametrize("module", [True, False], ids=["module", "stock"])
async def test_envoy_is_not_ready_without_a_node_in_service(
    tmp_path: Path, mariadb: MariaDb, module: bool
) -> None:
    async with run_probed_cluster(tmp_path, mariadb, nodes=0, module=module) as (stack, health):
        reason = "no TiDB server is in service" if module else ""
        await health.wait_for_reason(reason)
        node = await stack.add_tidb()
        await health.wait_until_ready()
        (await stack.api.post(f"/v1/nodes/{node.address}/drain", json={})).raise_for_status()
        await health.wait_for_reason(reason)
        assert await health.get("/healthz") == (200, "alive\n")


async def test_readiness_survives_the_control_plane_and_ends_with_the_envoy(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_probed_cluster(tmp_path, mariadb) as (stack, health):
        await stack.control_plane.kill()
        assert await health.get("/readyz") == READY
        assert (await health.get("/"))[0] == 404
        async with http_client(stack.envoy.admin_url) as admin:
            (await admin.post("/drain_listeners")).raise_for_status()
        # The connection of `health` is kept open. New connections are refused.
        assert await health.get("/readyz") == (503, "not ready: it is ending\n")
        port = int(stack.control_plane.settings["envoy_health"]["listen"].rpartition(":")[2])

        async def is_closed() -> bool:
            return not await accepts_connections(port)

        await wait_until(is_closed)  # the workers close their ports one after the other


async def probe(host: str, port: int, request: bytes = _REQUEST) -> bytes:
    """Probe like a load balancer, with a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    response = await reader.read()
    writer.close()
    return response


@pytest.mark.parametrize("module", [True, False])
async def test_probes_with_http_1_0(module: bool, tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_probed_cluster(tmp_path, mariadb, module=module) as (stack, health):
        await health.wait_until_ready()
        host, _, port = stack.control_plane.settings["envoy_health"]["listen"].rpartition(":")
        response = await probe(host, int(port), _HTTP_1_0_REQUEST)
        assert response.split(b"\r\n")[0].endswith(b" 200 OK"), response


async def test_probes_reach_no_node_and_fill_no_log(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_probed_cluster(tmp_path, mariadb) as (stack, _):
        host, _, port = stack.control_plane.settings["envoy_health"]["listen"].rpartition(":")
        log = stack.envoy.process.log
        size, usage = log.stat().st_size, await memory_of(stack)
        for _ in range(PROBES // 20):
            responses = await asyncio.gather(*(probe(host, int(port)) for _ in range(20)))
            assert all(response.startswith(b"HTTP/1.1 200 OK") for response in responses)
        stats = await stack.envoy.stats(
            r"^(cluster\.tidb\.upstream_cx_total|http\.health\.downstream_rq_2xx)$"
        )
        assert stats == {"cluster.tidb.upstream_cx_total": 0, "http.health.downstream_rq_2xx": PROBES}
        assert log.stat().st_size == size
        growth = await memory_of(stack) - usage
        print(f"\n{PROBES} probes; {usage} allocated bytes, and {growth} more afterwards")
        assert growth < MAX_GROWTH_BYTES


async def memory_of(stack: LocalCluster) -> int:
    return (await stack.envoy.stats("^server.memory_allocated$"))["server.memory_allocated"]


async def test_probes_with_tls(tmp_path: Path, mariadb: MariaDb) -> None:
    tls_files = PemFiles.create(tmp_path / "tls")
    with Ports() as ports:
        address = f"127.0.0.1:{ports.allocate()}"
        tls = {"cert": str(tls_files.cert), "key": str(tls_files.key)}
        settings: Mapping[str, Any] = {"envoy_health": {"listen": address, "tls": tls}}
        async with run_cluster(tmp_path, mariadb, settings=settings) as stack:
            assert stack.bugs() == []
            context = ssl.create_default_context(cafile=str(tls_files.ca))
            async with httpx2.AsyncClient(base_url=f"https://{address}", verify=context) as client:
                response = await client.get("/readyz")
                assert (response.status_code, response.text) == READY
