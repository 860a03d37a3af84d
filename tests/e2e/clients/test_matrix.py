"""Real clients through Envoy: whatever one does at a server directly it does through Envoy, step by step.

With Tidevoy's module when it is built, else through tcp_proxy alone.
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
from tests.support.clients.client_builds import (
    ALWAYS_COMPRESSING,
    CLIENTS,
    NEGOTIATED_COMPRESSING,
    LanguageNotPackaged,
    MatrixClient,
)
from tests.support.clients.matrix import format_table
from tests.support.clients.runner import SMALL_SIZE, MatrixTarget, run_client
from tests.support.clients.server import MatrixMariaDb, PemFiles
from tests.support.clients.steps import STEPS, StepResult, compare_results
from tests.support.module.bootstrap import require_module

# The first test of a language also installs its clients, which compiles a few minutes' worth of Rust.
pytestmark = [pytest.mark.ahead("tests.support.clients.client_builds"), pytest.mark.timeout(1200)]

MODULE = module_path.find_module() is not None
SERVERS = ("MariaDB", "TiDB stand-in")
WAYS = ("plain", "TLS")

clients = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


def named(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrizes a test with the clients of these names."""
    chosen = [client for client in CLIENTS if client.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("client", chosen, ids=lambda client: client.name)


@dataclass
class Matrix:
    """What came out so far: by title of a table, then by client."""

    directory: Path
    results: dict[str, dict[str, list[StepResult]]] = field(default_factory=dict)

    async def run(self, client: MatrixClient, target: MatrixTarget) -> list[StepResult]:
        """Run a client against a target, once."""
        results = self.results.setdefault(target.name, {})
        if client.name not in results:
            results[client.name] = await run_client(client, target, self.directory)
        return results[client.name]


@pytest.fixture(autouse=True)
def installed(client: MatrixClient) -> None:
    """The client, if this machine can have it."""
    try:
        client.build.install()
    except LanguageNotPackaged as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """Shown as tables when all is done."""
    made = Matrix(tmp_path_factory.mktemp("matrix"))
    yield made
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for title, results in made.results.items():
            print(f"\n\n{format_table(title, results, STEPS)}", end="")
        print(flush=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """The MariaDB with all data, also that of the stand-ins."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("matrix-mariadb")) as mariadb:
        mariadb.fill()
        yield mariadb


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb) -> PemFiles:
    """What clients of Envoy are shown: with the module something of its own, of another CA than the servers'.

    Without it, TLS is between the client and the server.
    """
    return PemFiles.create(tmp_path_factory.mktemp("envoys")) if MODULE else server.certificates


def settings(certificates: PemFiles) -> dict[str, Any]:
    """The control plane's."""
    if not MODULE:
        return {}
    shown = {"mode": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    return {"xds": {"filter": "module"}, "tls": {"client": shown}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def before_mariadb(
    tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb, shown: PemFiles
) -> AsyncIterator[LocalCluster]:
    """Envoy with the MariaDB as its only node."""
    values = {"nodes": [{"address": f"127.0.0.1:{server.port}"}], **settings(shown)}
    directory = tmp_path_factory.mktemp("before-mariadb")
    async with LocalCluster.start(directory, nodes=0, mariadb=server, settings=values) as stack:
        await stack.wait_until(lambda: _active(stack, 1), "the MariaDB to be in service")
        yield await _checked(stack)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def before_tidb(
    tmp_path_factory: pytest.TempPathFactory, server: MatrixMariaDb, shown: PemFiles
) -> AsyncIterator[LocalCluster]:
    """Envoy with two stand-ins."""
    values = settings(shown)
    directory = tmp_path_factory.mktemp("before-tidb")
    async with LocalCluster.start(directory, nodes=0, mariadb=server, settings=values) as stack:
        for _ in range(2):
            await stack.add_tidb(*server.certificates.arguments())
        await stack.wait_until(lambda: _active(stack, 2), "the stand-ins to be in service")
        yield await _checked(stack)
        assert stack.violations() == []


async def _active(stack: LocalCluster, count: int) -> bool:
    return list((await stack.states()).values()).count("active") == count and await stack.envoy.is_live()


async def _checked(stack: LocalCluster) -> LocalCluster:
    """Not what Envoy fell back to: the module when there is one."""
    (envoy,) = (await stack.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    assert envoy["filter"] == ("module" if MODULE else "none"), envoy
    return stack


@clients
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_client_does_through_envoy_what_it_does_directly(
    kind: str,
    way: str,
    client: MatrixClient,
    matrix: Matrix,
    server: MatrixMariaDb,
    shown: PemFiles,
    before_mariadb: LocalCluster,
    before_tidb: LocalCluster,
) -> None:
    stack = before_mariadb if kind == "MariaDB" else before_tidb
    port = server.port if kind == "MariaDB" else stack.tidb[0].port
    ca = shown.ca if way == "TLS" else None
    through = "Envoy with the module" if MODULE else "Envoy's tcp_proxy"
    direct = await matrix.run(client, MatrixTarget(f"{kind}, directly", port))
    assert [outcome for outcome in direct if outcome.is_ok is False] == []
    assert {outcome.step for outcome in direct if outcome.is_ok is None} == client.unsupported_steps
    proxied = await matrix.run(client, MatrixTarget(f"{kind}, {way}, through {through}", stack.sql_port, ca))
    assert compare_results(direct, proxied) == []


@named(ALWAYS_COMPRESSING)
async def test_a_client_that_compresses_unoffered_reads_why_it_is_refused(
    client: MatrixClient, server: MatrixMariaDb, shown: PemFiles, before_mariadb: LocalCluster, tmp_path: Path
) -> None:
    """Without the refusal it would wait for ever after its first query."""
    require_module()
    direct = await run_client(
        client, MatrixTarget("directly", server.port), tmp_path, size=SMALL_SIZE, compress=True
    )
    assert [outcome for outcome in direct if outcome.is_ok is False] == []
    for ca in (None, shown.ca):
        target = MatrixTarget("through Envoy", before_mariadb.sql_port, ca)
        (login,) = await run_client(client, target, tmp_path, steps=["login"], compress=True)
        assert login.is_ok is False
        assert "1235" in login.detail
        assert "sql.compression" in login.detail


@named(NEGOTIATED_COMPRESSING)
async def test_a_client_that_negotiates_compression_works_without_it(
    client: MatrixClient, before_mariadb: LocalCluster, tmp_path: Path
) -> None:
    target = MatrixTarget("through Envoy", before_mariadb.sql_port)
    steps = ["login", "query_text"]
    done = await run_client(client, target, tmp_path, size=SMALL_SIZE, steps=steps, compress=True)
    assert [outcome.is_ok for outcome in done] == [True, True], done


@clients
async def test_a_client_that_demands_tls_is_not_served_without(
    client: MatrixClient, mariadb: MariaDb, server: MatrixMariaDb, tmp_path: Path
) -> None:
    """Else the steps with TLS would prove nothing. `mariadb` has none."""
    for port, ca in [
        (mariadb.port, server.certificates.ca),
        (server.port, PemFiles.create(tmp_path / "other").ca),
    ]:
        (login,) = await run_client(
            client, MatrixTarget("a server to refuse", port, ca), tmp_path, steps=["login"]
        )
        assert login.is_ok is False
        assert "1045" not in login.detail, "it sent its password"
