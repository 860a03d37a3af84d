"""Clients whose sessions migrate run random statements. Their answers equal those of sessions without Envoy.

tests/e2e/module/test_migration_load.py does the same for a longer time.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sandbox.mariadb import MariaDb
from tests.support.clients.server import PemFiles
from tests.support.migration.differential import (
    AnswerMismatch,
    ComparedSession,
    DifferentialTrial,
    SessionPair,
    choose_seed,
)
from tests.support.migration.fleet import THREE_NODES, mariadb_session, run_fleet
from tests.support.migration.random_statements import ACTIVITIES, multi_packet_values


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_migrating_sessions_give_the_same_answers(
    tmp_path: Path, mariadb: MariaDb, with_tls: bool
) -> None:
    tls = PemFiles.create(tmp_path / "certificates") if with_tls else None
    trial = DifferentialTrial(
        ACTIVITIES, multi_packet_values, statements=1_500, clients=12, seed=choose_seed()
    )
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, tls=tls, workers=2) as nodes:
        summary = await trial.run(nodes, mariadb)
    print(summary)
    assert summary.statements >= trial.statements
    assert summary.migrations >= trial.clients
    assert summary.activities[multi_packet_values.__name__] == 1


async def no_migration() -> None:
    """Do nothing: the sessions of this test do not migrate."""


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("select 1", "select 2"),
        ("select 1 as a", "select 1 as b"),
        ("select cast(1 as char)", "select cast(1 as binary)"),
        ("select 1 union select 2", "select 1"),
        ("select 1; select 2", "select 1"),
        ("do 1", "do '1x'+0"),
        ("set @a = 1", "set autocommit = 0"),
        ("select 1 from nowhere", "selec"),
    ],
)
async def test_different_answers_are_detected(mariadb: MariaDb, left: str, right: str) -> None:
    async with mariadb_session(mariadb) as reference, mariadb_session(mariadb) as compared:
        pair = SessionPair(
            ComparedSession(reference, left, {}),
            ComparedSession(compared, right, {}),
            Random(1),
            no_migration,
        )
        await pair.run("select 1", "select 1 from nowhere")
        with pytest.raises(AnswerMismatch):
            await pair.run("{db}")
