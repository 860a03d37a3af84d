"""A rolling restart of all nodes under load that no client notices.

`make soak` restarts all nodes three times with every combination of statements, TLS and workers, and prints
a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pymysql
import pytest

from bench.migration.rolling_restart import (
    ALL_COMBINATIONS,
    MODERATE_TRANSACTIONS_PER_SECOND,
    NODE_COUNT,
    Combination,
    RollingRestartResult,
    run_rolling_restart,
)
from bench.sysbench import DATABASE
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.clients.server import PemFiles
from tests.support.e2e.cluster import run_cluster
from tests.support.soak import SOAK

pytestmark = pytest.mark.timeout(1200 if SOAK else 180)

COMBINATIONS: Sequence[Combination] = (
    ALL_COMBINATIONS if SOAK else (Combination(prepared=True, tls=True, workers=2),)
)
ROUNDS = 3 if SOAK else 1
MAX_STATEMENT_MS = 100.0
"""Limit for a statement while sessions migrate. Only a soak checks it, because it requires free CPU."""
_LINE = "{:<27}{:>13}{:>12}{:>8}{:>12}{:>7}{:>9}{:>9}{:>9}   {}"
_COLUMNS = (
    *("combination", "transactions", "statements", "errors", "reconnects", "migrated"),
    *("slowest", "own", "at rest", "failed migrations"),
)


@pytest.fixture(scope="module")
def results() -> Iterator[list[RollingRestartResult]]:
    """Yield the list that collects the results; print it at the end."""
    collected: list[RollingRestartResult] = []
    yield collected
    print("\nSlowest statement of an additional session, in ms: while sessions leave a node, around the")
    print("session's own migrations, and while no session leaves a node.\n" + _LINE.format(*_COLUMNS))
    for result in collected:
        print(format_result(result))


def format_result(result: RollingRestartResult) -> str:
    totals = result.counts
    slowest = (
        f"{time:.1f}"
        for time in (result.slowest_while_draining, result.slowest_while_migrating, result.slowest_at_rest)
    )
    failures = ", ".join(f"{reason}: {count}" for reason, count in result.failed_by_reason.items())
    counts = (
        totals.transactions,
        totals.statements,
        totals.errors,
        totals.reconnects,
        sum(result.migrated.values()),
    )
    return _LINE.format(result.combination.name, *(f"{count:,}" for count in counts), *slowest, failures)


@pytest.fixture
def drop_sysbench_tables(mariadb: MariaDb) -> Iterator[None]:
    """After the test, drop sysbench's tables from the MariaDB that all tests share."""
    yield
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        connection.query(f"drop database if exists {DATABASE}")


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.name)
@pytest.mark.usefixtures("drop_sysbench_tables")
async def test_rolling_restart_is_invisible_to_clients(
    tmp_path: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    results: list[RollingRestartResult],
    combination: Combination,
) -> None:
    arguments = [*signing.arguments]
    settings, ca = None, None
    if combination.tls:
        certificates = PemFiles.create(tmp_path / "certificates")
        arguments += certificates.arguments()
        certificate = {"cert": str(certificates.cert), "key": str(certificates.key)}
        trust = {"ca": str(certificates.ca), "verify": "full"}
        settings = {
            "tls": {"client": {"mode": "required", **certificate}, "backend": {"mode": "required", **trust}}
        }
        ca = certificates.ca
    async with run_cluster(
        tmp_path / "cluster",
        mariadb,
        nodes=NODE_COUNT,
        arguments=tuple(arguments),
        settings=settings,
        workers=combination.workers,
    ) as stack:
        result = await run_rolling_restart(
            stack, combination, tmp_path / "load", rounds=ROUNDS, rate=MODERATE_TRANSACTIONS_PER_SECOND, ca=ca
        )
    results.append(result)
    assert (result.counts.errors, result.counts.reconnects) == (0, 0)
    assert result.counts.transactions > 0
    assert "lost" not in result.failed_by_reason
    # Sessions migrated away from every node, and the additional session was among them.
    assert all(count > 0 for count in result.migrated.values()), result.migrations
    assert any(statement.migrated for statement in result.statements)
    if SOAK:
        assert result.slowest_while_draining <= MAX_STATEMENT_MS
