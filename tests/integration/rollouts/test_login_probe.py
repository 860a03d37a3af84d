"""A session on a stand-in TiDB, as it is opened before clients are led to a node that came back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.config.rollouts import LoginProbeSettings
from controlplane.rollouts.actions.login_probe import probe_login
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts
from tests.support.tidb_sim_clients import session_rules


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    async with TidbSim(SimSettings(session_rules(mariadb))) as running:
        yield running
        assert running.node.violations == []


def probe(**more: object) -> LoginProbeSettings:
    return LoginProbeSettings.model_validate({"user": "root", "timeout": 5, **more})


async def test_somebody_logs_in_and_a_statement_succeeds(sim: TidbSim) -> None:
    assert await probe_login(sim.sql_address, "tidb-0", probe(), proxy_protocol=False) == ""


async def test_why_not(sim: TidbSim, tmp_path: Path) -> None:
    failing = probe(statement="select * from no_such_table")
    problem = await probe_login(sim.sql_address, "tidb-0", failing, proxy_protocol=False)
    assert problem.startswith("cannot be logged in to, or the statement fails: (10")
    (tmp_path / "password").write_text("wrong\n")
    refused = await probe_login(
        sim.sql_address, "tidb-0", probe(password_file=tmp_path / "password"), proxy_protocol=False
    )
    assert "Access denied" in refused
    lost = probe(password_file=tmp_path / "none")
    assert "No such file" in await probe_login(sim.sql_address, "tidb-0", lost, proxy_protocol=False)


async def test_a_port_that_is_closed_or_says_nothing_more() -> None:
    assert "refused" in await probe_login("127.0.0.1:1", "tidb-0", probe(), proxy_protocol=False)
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as mute:
        problem = await probe_login(mute.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("cannot be logged in to")


@pytest.mark.parametrize("answer", [mysql_packet(b"\x0a"), bytes(50), mysql_packet(b"\x28" * 40)])
async def test_a_port_of_something_else(answer: bytes) -> None:
    async with run_fake_server(send_parts(answer)) as other:
        problem = await probe_login(other.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("cannot be logged in to: its answer is no MySQL (")
