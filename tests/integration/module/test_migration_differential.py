"""Clients that run random statements while their sessions move, and compare every answer.

tests/e2e/module/test_migration_load.py does the same for longer.
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


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
async def test_every_answer_is_that_of_a_session_that_does_not_move(
    tmp_path: Path, mariadb: MariaDb, secured: bool
) -> None:
    tls = PemFiles.create(tmp_path / "certificates") if secured else None
    trial = DifferentialTrial(
        ACTIVITIES, multi_packet_values, statements=1_500, clients=12, seed=choose_seed()
    )
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, tls=tls, workers=2) as nodes:
        figures = await trial.run(nodes, mariadb)
    print(figures)
    assert figures.statements >= trial.statements
    assert figures.migrations >= trial.clients
    assert figures.activities[multi_packet_values.__name__] == 1


async def nobody_moves() -> None:
    """There is nothing to wait for."""


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
async def test_an_answer_that_is_not_the_same_is_noticed(mariadb: MariaDb, left: str, right: str) -> None:
    async with mariadb_session(mariadb) as one, mariadb_session(mariadb) as other:
        pair = SessionPair(
            ComparedSession(one, left, {}), ComparedSession(other, right, {}), Random(1), nobody_moves
        )
        await pair.run("select 1", "select 1 from nowhere")
        with pytest.raises(AnswerMismatch):
            await pair.run("{db}")
