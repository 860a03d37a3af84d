"""Forwarding under load: every byte reaches the right client, and no connection stalls.

Envoy has two workers, in front of two real MariaDB servers. `make soak` runs the tests with larger counts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from bench.load_client import LoadClient, LoadClientResult
from sandbox.mariadb import MariaDb
from tests.support.module.envoy import ModuleEnvoy, run_envoy
from tests.support.soak import SOAK

# The first build of the client takes minutes, and so does a soak.
pytestmark = pytest.mark.timeout(3600)

Metrics = dict[tuple[str, tuple[str, ...]], int]


@dataclass(frozen=True)
class LoadSize:
    sessions: int = 5_000
    statements: int = 20_000
    readers: int = 20


LOAD = LoadSize(sessions=100_000, statements=1_000_000, readers=40) if SOAK else LoadSize()
RESULT_BYTES = 10 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second_mariadb(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MariaDb]:
    async with MariaDb.start(tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture
def nodes(mariadb: MariaDb, second_mariadb: MariaDb) -> list[str]:
    return [f"127.0.0.1:{server.port}" for server in (mariadb, second_mariadb)]


@pytest.fixture
async def proxy(tmp_path: Path, nodes: list[str]) -> AsyncIterator[ModuleEnvoy]:
    async with run_envoy(tmp_path / "envoy", nodes, workers=2) as process:
        yield process


@pytest.fixture
async def client(tmp_path: Path) -> LoadClient:
    return await LoadClient.create(tmp_path)


async def check_results(
    mode: str, result: LoadClientResult, proxy: ModuleEnvoy, nodes: Sequence[str]
) -> Metrics:
    """Print the results, check that there are no errors, and return the metrics after the last session."""
    print(f"\n{mode}: {json.dumps(dict(result.figures))}")
    assert (result.errors, result.error_text) == (0, "")
    await proxy.wait_no_sessions(*nodes)
    metrics = await proxy.metrics()
    assert all(metrics["logins", (node,)] > 0 for node in nodes)
    return metrics


def total(metrics: Metrics, name: str, label: str) -> int:
    """Return the sum over all nodes of the series with this label."""
    return sum(value for (series, labels), value in metrics.items() if series == name and label in labels)


async def test_no_session_receives_bytes_of_another(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    result = await client.check_nonces(proxy.port, sessions=LOAD.sessions, parallel=64, seconds=1800)
    await check_results("nonce", result, proxy, nodes)
    assert result.figures["sessions"] == LOAD.sessions
    assert result.figures["answers"] > LOAD.sessions
    assert result.figures["cut"] > LOAD.sessions // 5


async def test_packets_cut_anywhere_are_forwarded_without_a_stall(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    result = await client.send_in_pieces(proxy.port, statements=LOAD.statements, connections=16, seconds=1800)
    metrics = await check_results("gaps", result, proxy, nodes)
    statements = result.figures["statements"]
    assert result.figures["stalls"] == 0
    assert statements >= LOAD.statements
    # The module counts every command and every byte; MariaDB's OK packet has 11 bytes.
    assert total(metrics, "commands", "ping") + total(metrics, "commands", "query") == statements
    assert total(metrics, "bytes", "to_client") == 11 * statements


async def test_slow_readers_receive_everything_in_order(
    client: LoadClient, proxy: ModuleEnvoy, nodes: list[str]
) -> None:
    result = await client.read_slowly(proxy.port, connections=LOAD.readers, size=RESULT_BYTES, seconds=1800)
    await check_results("slow", result, proxy, nodes)
    rows = RESULT_BYTES // 1024
    assert result.figures["bytes"] == LOAD.readers * rows * 1027
