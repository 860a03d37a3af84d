"""Fixtures of more than one of the tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.fake_servers import GREETING, listening, packet, sends
from tests.support.migration.fault_arena import Arenas
from tests.support.migration.fleet import Fleet, fleet
from tests.support.tidb_sim_clients import rules_for


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """The address of something that greets as TiDB does."""
    async with listening(sends(packet(GREETING))) as peer:
        yield peer.endpoint


@pytest.fixture
async def source(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Where sessions come from; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(rules_for(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []


@pytest.fixture
async def target(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Where they go; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(rules_for(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []
    assert running.node.connections == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[Fleet]:
    """Nodes whose sessions move, for all tests of a module: to start an Envoy takes longer than they do."""
    async with fleet(tmp_path_factory.mktemp("nodes"), mariadb) as all_:
        yield all_


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: Fleet) -> AsyncIterator[Fleet]:
    """They have no session but those of the test, and see no violation."""
    yield running
    await running.empty()
    assert running.take_violations() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arenas]:
    """For all tests of a module whose moves fail."""
    async with AsyncExitStack() as running:
        yield Arenas(tmp_path_factory.mktemp("arenas"), running)
