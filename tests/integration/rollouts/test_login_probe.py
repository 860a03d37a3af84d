"""The login probe of a node that has returned in a rollout, against a simulated TiDB server."""

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
    async with TidbSim(SimSettings(session_rules(mariadb))) as server:
        yield server
        assert server.node.violations == []


def probe(**overrides: object) -> LoginProbeSettings:
    return LoginProbeSettings.model_validate({"user": "root", "timeout": 5, **overrides})


async def test_login_probe_succeeds(sim: TidbSim) -> None:
    assert await probe_login(sim.sql_address, "tidb-0", probe(), proxy_protocol=False) == ""


async def test_login_probe_failure_reasons(sim: TidbSim, tmp_path: Path) -> None:
    failing = probe(statement="select * from no_such_table")
    problem = await probe_login(sim.sql_address, "tidb-0", failing, proxy_protocol=False)
    assert problem.startswith("failed the login probe: (10")
    (tmp_path / "password").write_text("wrong\n")
    denied = await probe_login(
        sim.sql_address, "tidb-0", probe(password_file=tmp_path / "password"), proxy_protocol=False
    )
    assert "Access denied" in denied
    missing_password_file = probe(password_file=tmp_path / "none")
    assert "No such file" in await probe_login(
        sim.sql_address, "tidb-0", missing_password_file, proxy_protocol=False
    )


async def test_closed_or_silent_port_fails() -> None:
    assert "refused" in await probe_login("127.0.0.1:1", "tidb-0", probe(), proxy_protocol=False)
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as silent_server:
        problem = await probe_login(silent_server.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("failed the login probe: ")


@pytest.mark.parametrize("response", [mysql_packet(b"\x0a"), bytes(50), mysql_packet(b"\x28" * 40)])
async def test_response_that_is_not_mysql_fails(response: bytes) -> None:
    async with run_fake_server(send_parts(response)) as server:
        problem = await probe_login(server.endpoint, "tidb-0", probe(timeout=1), proxy_protocol=False)
    assert problem.startswith("failed the login probe: its response is not MySQL (")
