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
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts
from tests.support.migration.fault_arena import FaultArenas
from tests.support.migration.fleet import MigratingFleet, run_fleet
from tests.support.tidb_sim_clients import session_rules


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """The address of something that greets as TiDB does."""
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        yield peer.endpoint


@pytest.fixture
async def source(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Where sessions come from; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []


@pytest.fixture
async def target(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Where they go; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []
    assert running.node.connections == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    """Nodes whose sessions move, for all tests of a module: to start an Envoy takes longer than they do."""
    async with run_fleet(tmp_path_factory.mktemp("nodes"), mariadb) as all_:
        yield all_


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: MigratingFleet) -> AsyncIterator[MigratingFleet]:
    """They have no session but those of the test, and see no violation."""
    yield running
    await running.close_sessions()
    assert running.pop_violations() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultArenas]:
    """For all tests of a module whose moves fail."""
    async with AsyncExitStack() as running:
        yield FaultArenas(tmp_path_factory.mktemp("arenas"), running)
