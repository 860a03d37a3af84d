"""Real PD, store and TiDB servers as fixtures: one cluster for the whole run, a fresh database for each test.

A test may end, kill, stop (SIGSTOP) or reconfigure any server: it gets them back as they were. Envoy and the
control plane of the fixture `stack` are each test's own, and so are drains: they end with it.

Without the programs the tests fail and say how to get them.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from sandbox.stack import Stack
from sandbox.tidb_binaries import BinariesMissing, TidbBinaries, require
from sandbox.tidb_cluster import TidbCluster
from tests.tidb.sessions import Sessions, direct
from tests.tidb.variables import GlobalVariables

NODES = 3
GRACEFUL_WAIT = 3.0
"""Seconds from SIGTERM until the SQL port closes: enough for the health check, which asks each second."""
_FIRST_SECONDS = 600


@pytest.fixture(scope="session")
def tidb_bin() -> TidbBinaries:
    """The programs."""
    try:
        return require()
    except BinariesMissing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, tidb_bin: TidbBinaries
) -> AsyncIterator[TidbCluster]:
    """The one cluster of the run. Tests use `cluster`."""
    directory = tmp_path_factory.mktemp("tidb")
    async with TidbCluster.start(directory, tidb_bin, nodes=NODES, graceful_wait=GRACEFUL_WAIT) as running:
        yield running


@pytest.fixture
async def cluster(shared_cluster: TidbCluster) -> AsyncIterator[TidbCluster]:
    """PD, the store and `NODES` TiDB servers, all running. What the test does to them is undone behind it."""
    yield shared_cluster
    await shared_cluster.restore(NODES)


@pytest.fixture
def global_variables(cluster: TidbCluster) -> Iterator[GlobalVariables]:
    """Sets global variables for the length of a test."""
    with GlobalVariables(cluster) as variables:
        yield variables


@pytest.fixture
def database(cluster: TidbCluster) -> str:
    """The name of an empty database for this test alone.

    Make its tables before a server is killed: until it is back, TiDB may wait for it with each change of a
    schema (pkg/ddl/schemaver/syncer.go).
    """
    name = f"test_{uuid.uuid4().hex[:12]}"
    with direct(cluster.tidb[0]) as connection:
        connection.query(f"create database {name}")
    return name


@pytest.fixture
async def stack(tmp_path_factory: pytest.TempPathFactory, cluster: TidbCluster) -> AsyncIterator[Stack]:
    """A control plane and an Envoy with the module in front of `cluster`, all nodes in service.

    A test that wants other settings starts its own: `Stack.start(directory, cluster=cluster, settings=...)`.
    """
    async with Stack.start(tmp_path_factory.mktemp("stack"), cluster=cluster) as running:
        yield running
        assert running.violations() == []
        assert "a bug:" not in running.envoy.process.output()


@pytest.fixture
def sessions(stack: Stack, database: str) -> Iterator[Sessions]:
    """Opens client connections to `database`, through Envoy or to a node; closed behind the test."""
    with Sessions(stack, database) as opened:
        yield opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for the cluster, whose first start is slow with a real store on a slow disk."""
    here = [item for item in items if item.path.parent.name == "tidb"]
    if here:
        here[0].add_marker(pytest.mark.timeout(_FIRST_SECONDS))
