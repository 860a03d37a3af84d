"""A session on a stand-in TiDB, as it is opened before clients are led to a node that came back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.config.rollouts import Probe
from controlplane.rollouts.actions.login_probe import log_in
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.fake_servers import GREETING, listening, packet, sends
from tests.support.tidb_sim_clients import rules_for


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    async with TidbSim(SimSettings(rules_for(mariadb))) as running:
        yield running
        assert running.node.violations == []


def probe(**more: object) -> Probe:
    return Probe.model_validate({"user": "root", "timeout": 5, **more})


async def test_somebody_logs_in_and_a_statement_succeeds(sim: TidbSim) -> None:
    assert await log_in(sim.sql_address, "tidb-0", probe(), proxy_protocol=False) == ""


async def test_why_not(sim: TidbSim, tmp_path: Path) -> None:
    failing = probe(statement="select * from no_such_table")
    problem = await log_in(sim.sql_address, "tidb-0", failing, proxy_protocol=False)
    assert problem.startswith("cannot be logged in to, or the statement fails: (10")
    (tmp_path / "password").write_text("wrong\n")
    refused = await log_in(
        sim.sql_address, "tidb-0", probe(password_file=tmp_path / "password"), proxy_protocol=False
    )
    assert "Access denied" in refused
    lost = probe(password_file=tmp_path / "none")
    assert "No such file" in await log_in(sim.sql_address, "tidb-0", lost, proxy_protocol=False)


async def test_a_port_that_is_closed_or_says_nothing_more() -> None:
    assert "refused" in await log_in("127.0.0.1:1", "tidb-0", probe(), proxy_protocol=False)
    async with listening(sends(packet(GREETING))) as mute:
        problem = await log_in(mute.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("cannot be logged in to")


@pytest.mark.parametrize("answer", [packet(b"\x0a"), bytes(50), packet(b"\x28" * 40)])
async def test_a_port_of_something_else(answer: bytes) -> None:
    async with listening(sends(answer)) as other:
        problem = await log_in(other.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("cannot be logged in to: its answer is no MySQL (")
