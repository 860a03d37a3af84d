"""What goes straight through Envoy and the module arrives: every byte, at its own client, without a stall.

Two workers and two real MariaDB servers. `make soak` does the same many more times, and prints what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from bench.load_client import LoadClient, LoadClientResult
from sandbox.mariadb import MariaDb
from tests.support.module.envoy import ModuleEnvoy, run_envoy

SOAK = "TIDEVOY_SOAK"
"""The environment variable that makes the counts large."""

# The first build of the client takes minutes, and so does a soak.
pytestmark = [pytest.mark.ahead("tests.support.load.build_load_client"), pytest.mark.timeout(3600)]

Metrics = dict[tuple[str, tuple[str, ...]], int]

STATES = ("login", "idle", "busy", "transaction", "opaque")


@dataclass(frozen=True)
class Counts:
    """How much is tried."""

    sessions: int = 5_000
    statements: int = 20_000
    readers: int = 20


COUNTS = Counts(sessions=100_000, statements=1_000_000, readers=40) if os.environ.get(SOAK) else Counts()
RESULT = 10 << 20  # bytes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MariaDb]:
    async with MariaDb.start(tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture
def nodes(mariadb: MariaDb, second: MariaDb) -> list[str]:
    return [f"127.0.0.1:{server.port}" for server in (mariadb, second)]


@pytest.fixture
async def proxy(tmp_path: Path, nodes: list[str]) -> AsyncIterator[ModuleEnvoy]:
    async with run_envoy(tmp_path / "envoy", nodes, workers=2) as process:
        yield process


@pytest.fixture
async def client(tmp_path: Path) -> LoadClient:
    return await LoadClient.create(tmp_path)


async def shows(what: str, found: LoadClientResult, proxy: ModuleEnvoy, nodes: Sequence[str]) -> Metrics:
    """Prints what was found, which must be nothing wrong; what the module has counted when all have left."""
    print(f"\n{what}: {json.dumps(dict(found.figures))}")
    assert (found.errors, found.error_text) == (0, "")
    await proxy.wait_for_metrics({("sessions", node, state): 0 for node in nodes for state in STATES})
    metrics = await proxy.metrics()
    assert all(metrics["logins", (node,)] > 0 for node in nodes)
    return metrics


def total(metrics: Metrics, name: str, label: str) -> int:
    """Of all nodes, where the series has this label."""
    return sum(value for (series, labels), value in metrics.items() if series == name and label in labels)


async def test_no_session_sees_a_byte_of_another(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    found = await client.nonce(proxy.port, sessions=COUNTS.sessions, parallel=64, seconds=1800)
    await shows("nonce", found, proxy, nodes)
    assert found.figures["sessions"] == COUNTS.sessions
    assert found.figures["answers"] > COUNTS.sessions
    assert found.figures["cut"] > COUNTS.sessions // 5


async def test_no_packet_is_left_lying_wherever_it_is_cut(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    found = await client.gaps(proxy.port, statements=COUNTS.statements, connections=16, seconds=1800)
    metrics = await shows("gaps", found, proxy, nodes)
    statements = found.figures["statements"]
    assert found.figures["stalls"] == 0
    assert statements >= COUNTS.statements
    # Not one command is missed where it goes past the module, nor a byte: MariaDB's OK packet has 11.
    assert total(metrics, "commands", "ping") + total(metrics, "commands", "query") == statements
    assert total(metrics, "bytes", "to_client") == 11 * statements


async def test_who_reads_slowly_gets_all_in_order(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    found = await client.slow(proxy.port, connections=COUNTS.readers, size=RESULT, seconds=1800)
    await shows("slow", found, proxy, nodes)
    rows = RESULT // 1024
    assert found.figures["bytes"] == COUNTS.readers * rows * 1027
