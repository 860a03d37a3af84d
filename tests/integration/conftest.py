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
from tests.support.migration.fault_envoy import FaultEnvoys
from tests.support.migration.fleet import MigratingFleet, run_fleet
from tests.support.tidb_sim_clients import session_rules


@pytest.fixture(params=[False, True], ids=["sotw", "delta"])
def delta(request: pytest.FixtureRequest) -> bool:
    """Return whether Envoy uses the incremental variant of xDS."""
    return bool(request.param)


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """Yield the address of a fake server that sends TiDB's greeting."""
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        yield peer.endpoint


@pytest.fixture
async def source(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Yield the node that sessions migrate from. After the test, check that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        yield sim
        assert sim.node.violations == []


@pytest.fixture
async def target(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Yield the node that sessions migrate to. After the test, check that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        yield sim
        assert sim.node.violations == []
    assert sim.node.connections == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    """Yield a fleet that all tests of a module share, because Envoy starts slowly."""
    async with run_fleet(tmp_path_factory.mktemp("nodes"), mariadb) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: MigratingFleet) -> AsyncIterator[MigratingFleet]:
    """Yield the module's fleet. After the test, close its sessions and check that no node saw a violation."""
    yield running
    await running.close_sessions()
    assert running.pop_violations() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fault_envoys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultEnvoys]:
    """Yield Envoys in which tests cause migrations to fail. All tests of a module share them."""
    async with AsyncExitStack() as exit_stack:
        yield FaultEnvoys(tmp_path_factory.mktemp("fault_envoys"), exit_stack)
