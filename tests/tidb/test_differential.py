"""Random statements in sessions that migrate get the same answers as in sessions that stay on one server.

`make soak` runs 280,000 statements, with at least 2,000 migrations. The output says how to repeat a run: the
same `TIDEVOY_SEED` gives the same statements, but not the same timing.
"""

from __future__ import annotations

import pytest

from sandbox.local_cluster import LocalCluster
from tests.support.migration.differential import choose_seed
from tests.support.migration.random_statements import ACTIVITIES
from tests.support.soak import SOAK
from tests.support.tidb.differential import TidbTrial

STATEMENTS, MIGRATIONS, CLIENTS = (280_000, 2_000, 64) if SOAK else (3_000, 30, 12)


EXPECTED_RESULTS = {("moved", "ok"), *(("stayed", reason) for reason in ("refused", "states", "slow"))}
"""Results of migrations. Sessions with temporary tables and locks, and with lossy texts, stay."""


@pytest.mark.timeout(3600 if SOAK else 300)
async def test_migrating_sessions_get_the_same_answers(stack: LocalCluster, database: str) -> None:
    trial = TidbTrial(ACTIVITIES, statements=STATEMENTS, clients=CLIENTS, seed=choose_seed())
    result = await trial.run(stack, stack.tidb[0], database)
    print(result)
    assert result.migrations["moved", "ok"] >= MIGRATIONS
    assert set(result.migrations) <= EXPECTED_RESULTS
