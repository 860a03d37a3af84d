"""Fixtures shared by the integration tests."""

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
    """The address of a fake server that greets as TiDB does."""
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        yield peer.endpoint


@pytest.fixture
async def source(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """The node that sessions migrate from; checks that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        yield sim
        assert sim.node.violations == []


@pytest.fixture
async def target(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """The node that sessions migrate to; checks that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        yield sim
        assert sim.node.violations == []
    assert sim.node.connections == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    """A fleet whose sessions migrate, shared by a module: starting Envoy takes longer than its tests."""
    async with run_fleet(tmp_path_factory.mktemp("nodes"), mariadb) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: MigratingFleet) -> AsyncIterator[MigratingFleet]:
    """The module's fleet, with only the test's sessions; checks that it saw no protocol violation."""
    yield running
    await running.close_sessions()
    assert running.pop_violations() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultArenas]:
    """Arenas for failing migrations, for all tests of a module."""
    async with AsyncExitStack() as exit_stack:
        yield FaultArenas(tmp_path_factory.mktemp("arenas"), exit_stack)
