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
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox.cluster import Cluster
from sandbox.local_cluster import LocalCluster
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
from tests.tidb.conftest import GRACEFUL_WAIT, STACK_SETTINGS

PAGE_VARIABLE = "TIDEVOY_RELEASE_PAGE"


@cache
def known_releases() -> tuple[TidbRelease, ...]:
    binaries = find_binaries()
    return () if binaries is None else tuple(find_tidb_releases(binaries))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each release that its argument means; without any, fixtures report that."""
    releases = known_releases()
    arguments = {"release": releases or (None,), "older": releases[:-1], "newer": releases[1:]}
    for argument, chosen in arguments.items():
        if argument in metafunc.fixturenames:
            names = [release.version if release is not None else "none" for release in chosen]
            metafunc.parametrize(argument, chosen, ids=names, scope="session")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the page of releases to the file that the environment names."""
    file = os.environ.get(PAGE_VARIABLE)
    binaries = find_binaries()
    if not file or binaries is None:
        return
    results = [
        (report.nodeid, outcome)
        for outcome in ("passed", "failed", "error")
        for report in terminalreporter.stats.get(outcome, ())
    ]
    versions = {
        "PD": read_version(binaries.pd),
        binaries.store.program.name: read_version(binaries.store.program),
    }
    names = [release.version for release in known_releases()]
    differences = [(name, text) for name in names for text in differences_of(name)]
    page = render_page(results, names, versions, date.today(), differences)
    Path(file).write_text(page)


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
        yield cluster


@pytest.fixture
async def stack(
    tmp_path_factory: pytest.TempPathFactory, mixed_cluster: TidbCluster
) -> AsyncIterator[LocalCluster]:
    """Run a control plane and an Envoy in front of `mixed_cluster`; all nodes are active."""
    directory = tmp_path_factory.mktemp("stack")
    async with LocalCluster.start(directory, cluster=mixed_cluster, settings=STACK_SETTINGS) as started:
        yield started
        assert started.violations() == []


def node_of(cluster: Cluster, release: TidbRelease) -> Tidb:
    """Return the server of `mixed_cluster` that has this release."""
    return cluster.tidb[known_releases().index(release)]


async def drain_all_except(stack: LocalCluster, *kept: Tidb) -> None:
    """Drain the other nodes, so that sessions can only use the nodes in `kept`."""
    for node in stack.tidb:
        if node not in kept:
            await drain(stack, node)
