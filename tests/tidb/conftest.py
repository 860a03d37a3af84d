"""Fixtures with real PD, store and TiDB servers: one cluster for the whole run, a new database for each test.

A test may stop, kill, suspend (SIGSTOP) or reconfigure any server: `cluster` restores them for the next test.
Each test has its own Envoy and control plane (`stack`), so drains end with the test.

Without the programs of TiDB the tests fail with a message on how to install them.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import BinariesMissing, TidbBinaries, require_binaries
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.global_variables import GlobalVariables, restoring_variables
from tests.support.tidb.sessions import TrackedSessions, connect_directly
from tests.support.tidb.tiproxy import find_tiproxy

NODES = 3
GRACEFUL_WAIT = 3.0
"""Seconds from SIGTERM until the SQL port closes: enough for the health check, which runs every second."""
STACK_SETTINGS = {"rebalance": {"enabled": False}}
"""Without rebalancing, sessions stay on the nodes where a test has opened them."""
_CLUSTER_START_TIMEOUT_SECONDS = 600


@pytest.fixture(scope="session")
def tidb_bin() -> TidbBinaries:
    """Return the programs of a TiDB cluster."""
    try:
        return require_binaries()
    except BinariesMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, tidb_bin: TidbBinaries
) -> AsyncIterator[TidbCluster]:
    """Run one cluster for all tests. Tests use the fixture `cluster`."""
    directory = tmp_path_factory.mktemp("tidb")
    async with TidbCluster.start(directory, tidb_bin, nodes=NODES, graceful_wait=GRACEFUL_WAIT) as started:
        yield started


@pytest.fixture
async def cluster(shared_cluster: TidbCluster) -> AsyncIterator[TidbCluster]:
    """Yield PD, the store and `NODES` TiDB servers, all running; restore them after the test."""
    yield shared_cluster
    await shared_cluster.restore(NODES)


@pytest.fixture
async def global_variables(cluster: TidbCluster) -> AsyncIterator[GlobalVariables]:
    """Yield an object that sets global variables until the end of the test."""
    async with restoring_variables(cluster) as variables:
        yield variables


@pytest.fixture
def database(cluster: TidbCluster) -> str:
    """Return the name of an empty database that only this test uses.

    Create its tables before you kill a server: each schema change may wait until the server is back
    (pkg/ddl/schemaver/syncer.go).
    """
    return create_database(cluster.tidb[0])


@pytest.fixture
def tiproxy_program() -> str:
    program = find_tiproxy()
    if program is None:
        pytest.skip("there is no program tiproxy")
    return program


@pytest.fixture
async def stack(
    tmp_path_factory: pytest.TempPathFactory, cluster: TidbCluster
) -> AsyncIterator[LocalCluster]:
    """Run a control plane and an Envoy with the module in front of `cluster`; all nodes are active.

    The control plane does not rebalance. A test with other settings starts its own stack:
    `LocalCluster.start(directory, cluster=cluster, settings=...)`.
    """
    directory = tmp_path_factory.mktemp("stack")
    async with LocalCluster.start(directory, cluster=cluster, settings=STACK_SETTINGS) as started:
        yield started
        assert started.violations() == []
        assert started.bugs() == []


@pytest.fixture
def sessions(stack: LocalCluster, database: str) -> Iterator[TrackedSessions]:
    """Yield an object that opens client connections to `database`, through Envoy or to a node."""
    with closing(TrackedSessions(stack, database)) as tracked:
        yield tracked


def create_database(node: Tidb) -> str:
    """Create an empty database at this server; return its name."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with connect_directly(node) as connection:
        connection.query(f"create database {name}")
    return name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extend the timeout of each directory's first test, which starts a cluster: TiKV may start slowly."""
    first_items: dict[Path, pytest.Item] = {}
    for item in items:
        if "tidb" in item.path.parts[-3:-1]:
            first_items.setdefault(item.path.parent, item)
    for item in first_items.values():
        own = item.get_closest_marker("timeout")
        seconds = max(own.args[0] if own else 0, _CLUSTER_START_TIMEOUT_SECONDS)
        item.add_marker(pytest.mark.timeout(seconds), append=False)  # The first mark counts.
