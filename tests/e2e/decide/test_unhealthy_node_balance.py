"""Resource factors: sessions leave nodes with high CPU, full memory or errors, and return after recovery.

With `make soak` the test waits until the nodes' shares have fallen to their targets, and until all sessions
have returned. This takes minutes. Otherwise it checks only that sessions begin to leave. In both cases it
checks that the shares change as fast as docs/concepts/balancing.md says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.cluster import get_metrics, metric_key, reload_settings
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, is_fair, run_balanced_cluster
from tests.support.e2e.pinging_clients import run_pinging_clients
from tests.support.soak import SOAK

pytestmark = pytest.mark.timeout(1200 if SOAK else 120)

NODES, CLIENTS = 5, 100
HEALTHY_METRICS: Mapping[str, float] = {"cpu": 0.05, "memory": 0.2, "tikv_failures": 0.0}
TROUBLED_METRICS: Mapping[str, Mapping[str, float]] = {
    "cpu": {"cpu": 0.95},
    "memory": {"memory": 0.8},
    "health": {"tikv_failures": 0.6},
}
"""Metrics that reduce a node's share, per factor."""
SHARE_PER_SECOND = 1 / 60
"""Change of a share per second, as a fraction of a full share. The CPU factor changes more slowly."""
TOLERANCE = 0.25
"""Relative tolerance of a measured speed, since shares change once a second and the test samples them."""
STARTED_SHARE = 0.99
REMAINING_SHARE = (
    {"cpu": 0.5, "memory": 0.05, "health": 0.05} if SOAK else {"cpu": 0.95, "memory": 0.9, "health": 0.9}
)
"""The fraction of its share that a node still has at the end, per factor."""
TIMEOUT_SECONDS = 600.0 if SOAK else 60.0
BALANCE = {"slow_start": 0, "metrics": {"interval": 1.0}}


class ShareSamples:
    """Per factor, samples of the share to which it reduces its node, with monotonic times in seconds."""

    def __init__(self, cluster: BalancedCluster, nodes: Mapping[str, str]) -> None:
        """`nodes`: the address of the node that each factor reduces."""
        self._cluster, self._nodes = cluster, nodes
        self._samples: dict[str, list[tuple[float, float]]] = {factor: [] for factor in nodes}

    async def sample_until(self, is_reached: Callable[[Mapping[str, float]], bool], description: str) -> None:
        """Sample the shares until `is_reached` accepts them."""

        async def sample() -> bool:
            metrics, now = await get_metrics(self._cluster.stack), time.monotonic()
            shares = {
                factor: metrics.get(metric_key("tidevoy_node_factor_share", node=address, factor=factor), 1.0)
                for factor, address in self._nodes.items()
            }
            for factor, share in shares.items():
                self._samples[factor].append((share, now))
            return is_reached(shares)

        await self._cluster.stack.wait_until(sample, description, TIMEOUT_SECONDS)

    def speed(self, factor: str, start_share: float, end_share: float) -> float:
        """Return how much a share changes per second between `start_share` and `end_share`."""
        sign = 1 if end_share > start_share else -1
        samples = self._samples[factor]
        start_index = next(
            index for index, (share, _) in enumerate(samples) if sign * (share - start_share) >= 0
        )
        end_index = next(index for index, (share, _) in enumerate(samples) if sign * (share - end_share) >= 0)
        (first, started), (last, ended) = samples[start_index], samples[end_index]
        return abs(last - first) / (ended - started)


async def test_sessions_leave_troubled_nodes_and_return(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"balance": {**BALANCE, "metrics": {"enabled": False}}, "drain": {"reconnect_grace": 0}}
    async with (
        run_balanced_cluster(tmp_path, mariadb, signing, nodes=NODES, envoys=1, settings=settings) as cluster,
        run_pinging_clients() as clients,
    ):
        await clients.add_clients(cluster.ports * CLIENTS)
        fair_counts = await cluster.wait_for_counts(is_fair, "fair shares")
        troubled_nodes = dict(zip(TROUBLED_METRICS, cluster.stack.tidb, strict=False))
        troubled = {factor: node.address for factor, node in troubled_nodes.items()}
        for factor, node in troubled_nodes.items():
            await cluster.set_node_metrics(node, **TROUBLED_METRICS[factor])
        # The control plane reads metrics only from now on. If it saw the memory usage jump, memory would
        # seem to run out within seconds, and the node's share would fall faster.
        await reload_settings(cluster.stack, balance=BALANCE)
        falling = ShareSamples(cluster, troubled)
        await falling.sample_until(
            lambda shares: all(shares[factor] <= REMAINING_SHARE[factor] for factor in troubled),
            "shares to fall",
        )

        def have_fewer_sessions(counts: Mapping[str, int]) -> bool:
            healthy_minimum = min(
                count for address, count in counts.items() if address not in troubled.values()
            )
            return all(
                counts[address] < (fair_counts[address] if SOAK else healthy_minimum)
                for address in troubled.values()
            )

        counts_left = await cluster.wait_for_counts(have_fewer_sessions, "sessions to leave")
        speeds = {
            factor: falling.speed(factor, STARTED_SHARE, REMAINING_SHARE[factor]) for factor in troubled
        }
        lines = [f"shares fall by {format_speeds(speeds)} a second; {format_counts(counts_left, troubled)}"]
        assert_documented(speeds)
        if SOAK:
            for node in troubled_nodes.values():
                await cluster.set_node_metrics(node, **HEALTHY_METRICS)
            recovering = ShareSamples(cluster, troubled)
            await recovering.sample_until(lambda shares: min(shares.values()) == 1, "shares to recover")
            restored = await cluster.wait_for_counts(is_fair, "sessions to return")
            speeds = {
                factor: recovering.speed(factor, REMAINING_SHARE[factor] + 0.05, STARTED_SHARE)
                for factor in troubled
            }
            lines.append(
                f"they grow by {format_speeds(speeds)} a second; {format_counts(restored, troubled)}"
            )
            assert_documented(speeds)
        assert (clients.errors, clients.statement_count > 0) == ([], True)
    with capsys.disabled():
        print("", *lines, sep="\n  ", flush=True)


def assert_documented(speeds: Mapping[str, float]) -> None:
    """Check that shares change as fast as the documentation says."""
    assert all(speed <= SHARE_PER_SECOND * (1 + TOLERANCE) for speed in speeds.values()), speeds
    assert all(speeds[factor] >= SHARE_PER_SECOND * (1 - TOLERANCE) for factor in ("memory", "health")), (
        speeds
    )
    assert speeds["cpu"] > 0


def format_speeds(speeds: Mapping[str, float]) -> str:
    return ", ".join(f"{speed:.2%} ({factor})" for factor, speed in speeds.items())


def format_counts(counts: Mapping[str, int], troubled: Mapping[str, str]) -> str:
    """Return the session counts as text, with the factor of each troubled node."""
    others = [str(count) for address, count in counts.items() if address not in troubled.values()]
    return ", ".join(
        [
            *(f"{factor}: {counts[address]}" for factor, address in troubled.items()),
            f"others: {'/'.join(others)}",
        ]
    )
