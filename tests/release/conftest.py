"""The release that the tests install, a machine, and a node."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from release.__main__ import build_release
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.release.machine import Machine
from tests.support.tidb_sim_clients import session_rules

PARTS = frozenset({"debian", "chart", "sbom"})


@pytest.fixture(scope="session", autouse=True)
def _root_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the root directory, and boot a Debian")


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a release without images, or use the one in the directory TIDEVOY_DIST."""
    if existing := os.environ.get("TIDEVOY_DIST"):
        return Path(existing)
    directory = tmp_path_factory.mktemp("dist")
    build_release(directory, PARTS)
    return directory


@pytest.fixture
async def node(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim:
        yield sim


@pytest.fixture
async def machine(ports: Ports) -> AsyncIterator[Machine]:
    async with Machine.boot(ports) as booted:
        yield booted
