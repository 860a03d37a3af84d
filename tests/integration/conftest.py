"""Fixtures of more than one of the tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.peers import GREETING, listening, packet, sends
from tests.tidb_sim_rig import SigningFiles, rules_for


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """The address of something that greets as TiDB does."""
    async with listening(sends(packet(GREETING))) as peer:
        yield peer.endpoint


@pytest.fixture
async def source(mariadb: MariaDb, signing: SigningFiles) -> AsyncIterator[TidbSim]:
    """Where sessions come from; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(rules_for(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []


@pytest.fixture
async def target(mariadb: MariaDb, signing: SigningFiles) -> AsyncIterator[TidbSim]:
    """Where they go; no client may have wronged it at the end."""
    async with TidbSim(SimSettings(rules_for(mariadb), **signing.settings)) as running:
        yield running
        assert running.node.violations == []
    assert running.node.connections == 0
