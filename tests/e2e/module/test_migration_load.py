"""Many clients have sessions that migrate continuously. Every answer equals the answer of a direct session.

`make soak` runs 200,000 statements, which takes minutes. The output says how to repeat a run: the same
`TIDEVOY_SEED` gives the same statements, but not the same timing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from tests.support.clients.server import PemFiles
from tests.support.migration.differential import DifferentialTrial, choose_seed
from tests.support.migration.fleet import THREE_NODES, run_fleet
from tests.support.migration.random_statements import ACTIVITIES, multi_packet_values
from tests.support.module.bootstrap import ModuleConfig
from tests.support.soak import SOAK

pytestmark = pytest.mark.timeout(3600)

STATEMENTS, CLIENTS = (100_000, 32) if SOAK else (1_000, 8)
"""Numbers of statements and of clients in each test."""


@pytest.mark.parametrize(
    ("with_tls", "offload"),
    [(False, True), (True, True), (True, False)],
    ids=["plain", "tls", "tls, offload off"],
)
async def test_migrating_sessions_give_the_same_answers_under_load(
    tmp_path: Path, mariadb: MariaDb, with_tls: bool, offload: bool
) -> None:
    tls = PemFiles.create(tmp_path / "certificates") if with_tls else None
    trial = DifferentialTrial(
        ACTIVITIES, multi_packet_values, statements=STATEMENTS, clients=CLIENTS, seed=choose_seed()
    )
    config = ModuleConfig(live_settings={"offload": offload})
    async with run_fleet(tmp_path, mariadb, config=config, specs=THREE_NODES, tls=tls, workers=2) as nodes:
        summary = await trial.run(nodes, mariadb)
    print(summary)
    assert summary.statements >= STATEMENTS
    assert summary.migrations >= CLIENTS
    assert summary.activities[multi_packet_values.__name__] == 1
