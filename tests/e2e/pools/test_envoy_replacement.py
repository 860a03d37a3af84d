"""Connection pools behind HAProxy see no error while both Envoys are replaced, one after the other.

With TIDEVOY_SOAK=1, the pools also run with their default settings, and a table shows all results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from tests.support.build_tools import LanguageNotPackaged
from tests.support.clients.pools import (
    POOLS,
    PoolClient,
    PoolResult,
    PoolSettings,
    create_counters,
    run_pool,
)
from tests.support.e2e.envoys_behind_haproxy import run_envoys_behind_haproxy
from tests.support.soak import SOAK

# The first test of a language installs its clients if `make test` has not. That may take minutes.
pytestmark = pytest.mark.timeout(1200)

WORKERS = 32 if SOAK else 4
ROUNDS = 5 if SOAK else 1
SETTINGS: tuple[PoolSettings, ...] = ("recommended", "default") if SOAK else ("recommended",)


@dataclass
class Report:
    """The results so far, with the name of the pool and its settings."""

    results: list[tuple[PoolClient, PoolSettings, PoolResult]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a line of JSON for each result."""
        for client, settings, result in self.results:
            values = {
                "pool": client.name,
                "settings": client.settings[settings],
                "workers": WORKERS,
                "replacements": 2 * ROUNDS,
                "transactions": sum(result.committed),
                "errors": result.errors,
            }
            yield json.dumps(values)

    def table(self) -> Iterator[str]:
        yield "| pool | settings | transactions | errors |"
        yield "|---|---|---|---|"
        for client, settings, result in self.results:
            cells = (client.name, client.settings[settings], f"{sum(result.committed):,}", result.error_count)
            yield f"| {' | '.join(map(str, cells))} |"


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Collect the results, and print them at the end."""
    collected = Report()
    yield collected
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *collected.lines(), *(collected.table() if SOAK else ()), sep="\n", flush=True)


@pytest.fixture(autouse=True)
def install_pool(client: PoolClient) -> None:
    """Install the pool, or skip the test if no package of its language is available."""
    try:
        client.build.install()
    except LanguageNotPackaged as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("client", POOLS, ids=lambda client: client.name)
async def test_pool_while_both_envoys_are_replaced(
    client: PoolClient,
    settings: PoolSettings,
    tmp_path: Path,
    mariadb: MariaDb,
    database: str,
    report: Report,
) -> None:
    with (
        pymysql.connect(
            unix_socket=str(mariadb.socket), user="root", database=database, autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        for statement in create_counters(WORKERS):
            cursor.execute(statement)
        async with run_envoys_behind_haproxy(tmp_path, mariadb) as envoys:
            load = run_pool(
                client,
                tmp_path,
                address=f"127.0.0.1:{envoys.haproxy.sql_port}",
                database=database,
                workers=WORKERS,
                settings=settings,
            )
            async with load as pool:
                for _ in range(ROUNDS):
                    await envoys.replace_all()
                result = await pool.stop()
        report.results.append((client, settings, result))
        cursor.execute("select count from counters order by worker")
        # Neither lost nor doubled.
        assert tuple(row[0] for row in cursor.fetchall()) == result.committed
    if settings == "recommended":
        assert result.errors == {}
