"""Fixtures with builds of Tidevoy. They are kept in the user's cache directory, since each takes minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import pytest_asyncio

from tests.support.network_namespace import network_namespace
from tests.support.upgrade.builds import Upgrade, current_build, next_build, previous_build

PREVIOUS, NEXT = "previous-to-current", "current-to-next"


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=[PREVIOUS, NEXT])
async def upgrade(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Upgrade:
    """Return two builds: the previous one and this checkout, or this checkout and the next one."""
    current = current_build()
    if request.param == PREVIOUS:
        return Upgrade(await previous_build(), current)
    return Upgrade(current, await next_build(tmp_path_factory.mktemp("next")))


@pytest.fixture
def isolated_network() -> Iterator[None]:
    """Run the test in a network namespace in which no connection is reset when an Envoy is replaced."""
    with network_namespace():
        yield
