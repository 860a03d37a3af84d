"""A few idle sessions and migrations with a real Envoy: checks that figures exist, not their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.load_client import LoadClient
from bench.migration.benchmark import measure_crowd, measure_repeated_moves
from bench.migration.figures import crowd_figures, repeated_moves_figures
from tests.support.module.bootstrap import require_module


@pytest.fixture
async def client(tmp_path: Path) -> LoadClient:
    return await LoadClient.create(tmp_path)


@pytest.mark.timeout(900)  # the first build of the load client takes minutes
async def test_drain_migrates_the_sessions_of_one_node(tmp_path: Path, client: LoadClient) -> None:
    crowd = await measure_crowd(tmp_path, require_module(), client, 200)
    # One is with the node apart, when it comes to that.
    assert 15 <= crowd.moved <= 20
    assert not any(statement.moved for statement in crowd.statements)
    assert sum(crowd.without_drain.loop_durations.values()) > 100
    assert all(figure.value > 0 for figure in crowd_figures(crowd))


@pytest.mark.timeout(900)
async def test_repeated_migrations_leave_no_resources(tmp_path: Path, client: LoadClient) -> None:
    long = await measure_repeated_moves(tmp_path, require_module(), client, 400)
    assert [moves for moves, _ in long.samples] == [40, 200, 400]
    figures = repeated_moves_figures(long)
    assert [figure.verdict for figure in figures[1:]] == ["met"] * 5
