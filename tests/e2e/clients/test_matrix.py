"""Real clients through Envoy: every step has the same result as with a direct connection to the server.

The tests use Tidevoy's module if it is built, and otherwise tcp_proxy alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from controlplane.xds.bootstrap import module_path
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from tests.support.build_tools import LanguageNotPackaged
from tests.support.clients.client_builds import (
    ALWAYS_COMPRESSING,
    CLIENTS,
    NEGOTIATED_COMPRESSING,
    MatrixClient,
)
from tests.support.clients.matrix import format_table
from tests.support.clients.runner import SMALL_SIZE, MatrixTarget, run_client
from tests.support.clients.server import MatrixMariaDb, PemFiles
from tests.support.clients.steps import STEPS, StepResult, compare_results
from tests.support.module.bootstrap import require_module
from tests.support.soak import SOAK

# The first test of a language installs its clients if `make test` has not. That may take minutes.
pytestmark = pytest.mark.timeout(1200)

HAS_MODULE = module_path.find_module() is not None
# Encryption ends in Envoy, whatever the server is, so one kind of server is enough to test each encryption.
# `make matrix` runs all combinations.
COMBINATIONS = (
    [
        (server_kind, encryption)
        for server_kind in ("MariaDB", "simulated TiDB")
        for encryption in ("plain", "TLS")
    ]
    if SOAK
    else [("MariaDB", "TLS"), ("simulated TiDB", "plain")]
)

clients = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


def with_clients(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test with the clients of these names."""
    chosen = [client for client in CLIENTS if client.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("client", chosen, ids=lambda client: client.name)


@dataclass
class Matrix:
    """The results so far, by table title and client name."""

    directory: Path
    results: dict[str, dict[str, list[StepResult]]] = field(default_factory=dict)

    async def run(self, client: MatrixClient, target: MatrixTarget) -> list[StepResult]:
        """Return the results of a client's steps against a target. Only the first call runs the client."""
        results = self.results.setdefault(target.name, {})
        if client.name not in results:
            results[client.name] = await run_client(client, target, self.directory)
        return results[client.name]


@pytest.fixture(autouse=True)
def install_client(client: MatrixClient) -> None:
    """Install the client, or skip the test if no package of its language is available."""
    try:
        client.build.install()
    except LanguageNotPackaged as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """Yield the matrix; print it as tables at the end."""
    collected = Matrix(tmp_path_factory.mktemp("matrix"))
    yield collected
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for title, results in collected.results.items():
            print(f"\n\n{format_table(title, results, STEPS)}", end="")
        print(flush=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """Run a MariaDB with the test data. The simulated TiDB servers store their data in it."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("matrix-mariadb")) as mariadb:
        mariadb.fill()
        yield mariadb


@pytest.fixture(scope="module")
def envoy_certificates(tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb) -> PemFiles:
    """Return the certificates that clients see: Envoy's own with the module, the servers' without it."""
    return PemFiles.create(tmp_path_factory.mktemp("envoys")) if HAS_MODULE else server.certificates


def settings(certificates: PemFiles) -> dict[str, Any]:
    # No KILL is refused because the control plane has just started.
    drain = {"reconnect_grace": 0}
    if not HAS_MODULE:
        return {"drain": drain}
    envoy_certificates = {"mode": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    return {"xds": {"filter": "module"}, "tls": {"client": envoy_certificates}, "drain": drain}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mariadb_stack(
    tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb, envoy_certificates: PemFiles
) -> AsyncIterator[LocalCluster]:
    """Run an Envoy with the MariaDB as its only node."""
    values = {"nodes": [{"address": f"127.0.0.1:{server.port}"}], **settings(envoy_certificates)}
    directory = tmp_path_factory.mktemp("before-mariadb")
    async with LocalCluster.start(directory, nodes=0, mariadb=server, settings=values) as stack:
        await stack.wait_until(lambda: stack.is_in_service(1), "the MariaDB to be active")
        yield await _check_filter(stack)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tidb_stack(
    tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb, envoy_certificates: PemFiles
) -> AsyncIterator[LocalCluster]:
    """Run an Envoy with two simulated TiDB servers."""
    values = settings(envoy_certificates)
    directory = tmp_path_factory.mktemp("before-tidb")
    async with LocalCluster.start(directory, nodes=0, mariadb=server, settings=values) as stack:
        for _ in range(2):
            await stack.add_tidb(*server.certificates.arguments())
        await stack.wait_until(lambda: stack.is_in_service(2), "the simulated servers to be active")
        yield await _check_filter(stack)
        assert stack.violations() == []


async def _check_filter(stack: LocalCluster) -> LocalCluster:
    """Check that Envoy uses the module if it is built. Return the cluster."""
    (envoy,) = (await stack.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    assert envoy["filter"] == ("module" if HAS_MODULE else "none"), envoy
    return stack


@clients
@pytest.mark.parametrize(("server_kind", "encryption"), COMBINATIONS)
async def test_client_behaves_the_same_through_envoy(
    server_kind: str,
    encryption: str,
    client: MatrixClient,
    matrix: Matrix,
    server: MatrixMariaDb,
    envoy_certificates: PemFiles,
    mariadb_stack: LocalCluster,
    tidb_stack: LocalCluster,
) -> None:
    stack = mariadb_stack if server_kind == "MariaDB" else tidb_stack
    port = server.port if server_kind == "MariaDB" else stack.tidb[0].port
    ca = envoy_certificates.ca if encryption == "TLS" else None
    proxy_name = "Envoy with the module" if HAS_MODULE else "Envoy's tcp_proxy"
    direct = await matrix.run(client, MatrixTarget(f"{server_kind}, directly", port))
    assert [result for result in direct if result.is_ok is False] == []
    assert {result.step for result in direct if result.is_ok is None} == client.unsupported_steps
    proxied = await matrix.run(
        client, MatrixTarget(f"{server_kind}, {encryption}, through {proxy_name}", stack.sql_port, ca)
    )
    assert compare_results(direct, proxied) == []


@with_clients(ALWAYS_COMPRESSING)
async def test_client_that_always_compresses_receives_the_reason(
    client: MatrixClient,
    server: MatrixMariaDb,
    envoy_certificates: PemFiles,
    mariadb_stack: LocalCluster,
    tmp_path: Path,
) -> None:
    """Without this error, the client would wait forever for the answer to its first query."""
    require_module()
    direct = await run_client(
        client, MatrixTarget("directly", server.port), tmp_path, size=SMALL_SIZE, compress=True
    )
    assert [result for result in direct if result.is_ok is False] == []
    for ca in (None, envoy_certificates.ca):
        target = MatrixTarget("through Envoy", mariadb_stack.sql_port, ca)
        (login,) = await run_client(client, target, tmp_path, steps=["login"], compress=True)
        assert login.is_ok is False
        assert "1235" in login.detail
        assert "sql.compression" in login.detail


@with_clients(NEGOTIATED_COMPRESSING)
async def test_client_that_negotiates_compression_works_without_it(
    client: MatrixClient, mariadb_stack: LocalCluster, tmp_path: Path
) -> None:
    target = MatrixTarget("through Envoy", mariadb_stack.sql_port)
    steps = ["login", "query_text"]
    results = await run_client(client, target, tmp_path, size=SMALL_SIZE, steps=steps, compress=True)
    assert [result.is_ok for result in results] == [True, True], results


@clients
async def test_client_that_requires_tls_rejects_a_server_without_it(
    client: MatrixClient, mariadb: MariaDb, server: MatrixMariaDb, tmp_path: Path
) -> None:
    """`mariadb` has no TLS, and the certificate of `server` comes from another CA than the client expects."""
    for port, ca in [
        (mariadb.port, server.certificates.ca),
        (server.port, PemFiles.create(tmp_path / "other").ca),
    ]:
        (login,) = await run_client(
            client, MatrixTarget("an untrusted server", port, ca), tmp_path, steps=["login"]
        )
        assert login.is_ok is False
        assert "1045" not in login.detail, "the client sent its password"
