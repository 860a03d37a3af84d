"""A few idle sessions and migrations with a real Envoy: checks that the figures exist, not their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from bench.load_client import LoadClient
from bench.migration import benchmark
from bench.migration.benchmark import measure_idle_sessions, measure_repeated_migrations
from bench.migration.figures import idle_sessions_figures, repeated_migrations_figures
from tests.support.module.bootstrap import require_module


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tmp_path_factory: pytest.TempPathFactory) -> LoadClient:
    return await LoadClient.create(tmp_path_factory.mktemp("build"))


@pytest.fixture(autouse=True)
def short_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the measurement without a drain; Envoy still runs some event loop iterations in this time."""
    monkeypatch.setattr(benchmark, "_BASELINE_SECONDS", 1.0)


@pytest.mark.timeout(900)  # the first build of the load client takes minutes
async def test_drain_migrates_the_sessions_of_one_node(tmp_path: Path, client: LoadClient) -> None:
    idle = await measure_idle_sessions(tmp_path, require_module(), client, 200)
    # A node gets 20 sessions, or fewer if some go to the last node, which gets hardly any.
    assert 15 <= idle.migrated <= 20
    assert not any(statement.migrated for statement in idle.statements)
    assert sum(idle.without_drain.loop_durations.values()) > 100
    assert all(figure.value > 0 for figure in idle_sessions_figures(idle))


@pytest.mark.timeout(900)
async def test_repeated_migrations_leave_no_resources(tmp_path: Path, client: LoadClient) -> None:
    repeated = await measure_repeated_migrations(tmp_path, require_module(), client, 400)
    assert [count for count, _ in repeated.samples] == [40, 200, 400]
    figures = repeated_migrations_figures(repeated)
    assert [figure.verdict for figure in figures[1:]] == ["met"] * 5
