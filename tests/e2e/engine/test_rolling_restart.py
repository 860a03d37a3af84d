"""A rolling restart of all nodes under load, which no client notices.

`make soak` restarts all nodes three times with each combination of statements, TLS and workers, and prints a
table.
"""

from __future__ import annotations

import os
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
from bench.sysbench_load.table import DATABASE
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.clients.server import PemFiles
from tests.support.e2e.cluster import run_cluster

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
pytestmark = pytest.mark.timeout(1200 if SOAK else 180)

COMBINATIONS: Sequence[Combination] = (
    ALL_COMBINATIONS if SOAK else (Combination(prepared=True, tls=True, workers=2),)
)
ROUNDS = 3 if SOAK else 1
RATE = MODERATE_TRANSACTIONS_PER_SECOND if SOAK else 0
SLOWEST = 100.0
"""Milliseconds that a statement may take while sessions move, where the machine has room (in a soak)."""
_LINE = "{:<27}{:>13}{:>12}{:>8}{:>12}{:>7}{:>9}{:>9}{:>9}   {}"
_HEADS = (
    *("combination", "transactions", "statements", "errors", "reconnects", "moved"),
    *("slowest", "its own", "without", "attempts that came to nothing"),
)


@pytest.fixture(scope="module")
def table() -> Iterator[list[RollingRestartResult]]:
    """What has been found so far; printed at the end."""
    found: list[RollingRestartResult] = []
    yield found
    print("\nSlowest statement of one more session, in ms: while sessions left a node, around its own moves,")
    print("and while none left.\n" + _LINE.format(*_HEADS))
    for one in found:
        print(told(one))


def told(one: RollingRestartResult) -> str:
    """A line of the table."""
    tally = one.counts
    slow = (
        f"{time:.1f}" for time in (one.slowest_while_draining, one.slowest_while_moving, one.slowest_at_rest)
    )
    stayed = ", ".join(f"{reason}: {count}" for reason, count in one.failed_by_reason.items())
    counts = (tally.transactions, tally.statements, tally.errors, tally.reconnects, sum(one.moved.values()))
    return _LINE.format(one.combination.name, *(f"{count:,}" for count in counts), *slow, stayed)


@pytest.fixture
def emptied(mariadb: MariaDb) -> Iterator[None]:
    """Behind the test the MariaDB that all tests share has no tables of sysbench's."""
    yield
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        connection.query(f"drop database if exists {DATABASE}")


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.name)
@pytest.mark.usefixtures("emptied")
async def test_no_client_notices_a_rolling_restart(
    tmp_path: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    table: list[RollingRestartResult],
    combination: Combination,
) -> None:
    arguments = [*signing.arguments]
    settings, ca = None, None
    if combination.tls:
        certificates = PemFiles.create(tmp_path / "certificates")
        arguments += certificates.arguments()
        shown = {"cert": str(certificates.cert), "key": str(certificates.key)}
        trusted = {"ca": str(certificates.ca), "verify": "full"}
        settings = {
            "tls": {"client": {"mode": "required", **shown}, "backend": {"mode": "required", **trusted}}
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
        found = await run_rolling_restart(
            stack, combination, tmp_path / "load", rounds=ROUNDS, rate=RATE, ca=ca
        )
    table.append(found)
    assert (found.counts.errors, found.counts.reconnects) == (0, 0)
    assert found.counts.transactions > 0
    assert "lost" not in found.failed_by_reason
    # Each node was left by sessions, and the one beside the load was among them.
    assert all(count > 0 for count in found.moved.values()), found.migrations
    assert any(one.moved for one in found.statements)
    if SOAK:
        assert found.slowest_while_draining <= SLOWEST
