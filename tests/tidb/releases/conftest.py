"""Fixtures with servers of several releases of TiDB on one store.

The releases are those of `sandbox.tidb_binaries.find_tidb_releases`. With one release, the tests of upgrades
are skipped.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import date
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox.cluster import Cluster
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import (
    TidbBinaries,
    TidbRelease,
    find_binaries,
    find_tidb_releases,
    read_version,
)
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.node_operations import drain
from tests.support.tidb.release_differences import differences_of
from tests.support.tidb.release_page import render_page
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.waiting import wait_until
from tests.tidb.conftest import GRACEFUL_WAIT, create_database

PAGE_VARIABLE = "TIDEVOY_RELEASE_PAGE"
_OWNER_SECONDS = 60.0


@cache
def known_releases() -> tuple[TidbRelease, ...]:
    binaries = find_binaries()
    return () if binaries is None else tuple(find_tidb_releases(binaries))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `release`, `newer` and `upgrade`. Without TiDB, the fixture `tidb_bin` fails the test."""
    releases = known_releases()
    parameters: dict[str, dict[str, Any]] = {
        "release": {release.version: release for release in releases} or {"none": None},
        "newer": {release.version: release for release in releases[1:]},
        "upgrade": {f"{old.version}-{new.version}": (old, new) for old, new in combinations(releases, 2)},
    }
    for argument, values in parameters.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, list(values.values()), ids=list(values), scope="session")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Write the page of releases to the file that the environment names, if all tests have run."""
    file, stats = os.environ.get(PAGE_VARIABLE), terminalreporter.stats
    if not file or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    binaries = find_binaries()
    if binaries is None or "deselected" in stats:
        return
    store = binaries.store.program
    versions = {"PD": read_version(binaries.pd), store.name: read_version(store)}
    results = [
        (report.nodeid, "" if outcome == "passed" else describe_failure(report))
        for outcome in ("passed", "failed", "error")
        for report in stats.get(outcome, ())
    ]
    names = [release.version for release in known_releases()]
    differences = [
        (release.version, text) for release in known_releases() for text in differences_of(release)
    ]
    Path(file).write_text(render_page(results, names, versions, date.today(), differences))


def describe_failure(report: Any) -> str:
    """Return the first line of a failed test's error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message).partition("\n")[0] or "failed"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mixed_cluster(
    tmp_path_factory: pytest.TempPathFactory, tidb_bin: TidbBinaries
) -> AsyncIterator[TidbCluster]:
    """Run one server of each release, oldest first, on one store."""
    first, *later = known_releases()
    directory, binaries = tmp_path_factory.mktemp("releases"), replace(tidb_bin, tidb=first.program)
    async with TidbCluster.start(directory, binaries, nodes=1, graceful_wait=GRACEFUL_WAIT) as cluster:
        for release in later:
            cluster.release = release
            await cluster.new_node().launch()
        with connect_directly(cluster.tidb[-1]) as root:
            # It is on by default, but not in a cluster that was upgraded from a release without it.
            query_rows(root, "set global tidb_enable_resource_control = on")
        yield cluster


@pytest.fixture
async def cluster(mixed_cluster: TidbCluster) -> AsyncIterator[TidbCluster]:
    """Yield `mixed_cluster`; restore it after the test. The fixture `stack` is in front of it, too."""
    await wait_until(lambda: newest_changes_schemas(mixed_cluster), _OWNER_SECONDS)
    yield mixed_cluster
    await mixed_cluster.restore(len(known_releases()))


@pytest.fixture
def database(cluster: TidbCluster) -> str:
    """Return the name of an empty database. The server of the newest release creates it."""
    return create_database(cluster.tidb[-1])


async def newest_changes_schemas(cluster: TidbCluster) -> bool:
    """Return whether the newest server executes all schema changes. If not, ask the one that does to resign.

    TiDB 6.5 and 7.1 do not know the jobs of newer releases: "invalid ddl job type".
    """
    with connect_directly(cluster.tidb[-1]) as root:
        rows = query_rows(root, "admin show ddl")
    (owner,) = [node for node in cluster.tidb if node.address in str(rows)]
    if owner is cluster.tidb[-1]:
        return True
    async with http_client(owner.status_url) as client:
        await client.post("/ddl/owner/resign")
    return False


def node_of(cluster: Cluster, release: TidbRelease) -> Tidb:
    """Return the server of `mixed_cluster` that has this release."""
    return cluster.tidb[known_releases().index(release)]


async def drain_all_except(stack: LocalCluster, *kept: Tidb) -> None:
    """Drain the other nodes, so that sessions can only use the nodes in `kept`."""
    for node in stack.tidb:
        if node not in kept:
            await drain(stack, node)
