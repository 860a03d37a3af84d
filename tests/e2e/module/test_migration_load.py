"""Sessions of many clients that move all the time: every answer is that of a session which does not.

`make soak` does it with 200,000 statements, which takes minutes. What it prints says how to repeat it: the
same `TIDEVOY_SEED` gives the same statements, though not the same moments.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from tests.support.clients.server import PemFiles
from tests.support.migration.differential import DifferentialTrial, choose_seed
from tests.support.migration.fleet import THREE_NODES, run_fleet
from tests.support.migration.random_statements import ACTIVITIES, multi_packet_values

SOAK = "TIDEVOY_SOAK"
"""The environment variable that makes the counts large."""

pytestmark = pytest.mark.timeout(3600)

STATEMENTS, CLIENTS = (100_000, 32) if os.environ.get(SOAK) else (1_000, 8)
"""Of each of the two tests."""


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
async def test_no_answer_changes_when_sessions_move(tmp_path: Path, mariadb: MariaDb, secured: bool) -> None:
    tls = PemFiles.create(tmp_path / "certificates") if secured else None
    trial = DifferentialTrial(
        ACTIVITIES, multi_packet_values, statements=STATEMENTS, clients=CLIENTS, seed=choose_seed()
    )
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, tls=tls, workers=2) as nodes:
        figures = await trial.run(nodes, mariadb)
    print(figures)
    assert figures.statements >= STATEMENTS
    assert figures.migrations >= CLIENTS
    assert figures.activities[multi_packet_values.__name__] == 1
