"""A node whose CPU is pinned, one that swaps, and one whose errors rise: sessions leave them, and come back.

`make soak` waits until few are left, and until all are back, which takes minutes. Else it is seen that they
begin to leave. Both see how fast (docs/concepts/balancing.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.client_crowd import run_crowd
from tests.support.e2e.cluster import get_metrics, metric_key, reload_settings
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, is_fair, run_balanced_cluster

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
pytestmark = pytest.mark.timeout(1200 if SOAK else 120)

NODES, CLIENTS = 5, 100
WELL: Mapping[str, float] = {"cpu": 0.05, "memory": 0.2, "tikv_failures": 0.0}
TROUBLES: Mapping[str, Mapping[str, float]] = {
    "cpu": {"cpu": 0.95},
    "memory": {"memory": 0.8},
    "health": {"tikv_failures": 0.6},
}
"""By factor: what one of the nodes shows, which takes something of its share."""
SPEED = 1 / 60
"""Of a full share, per second; that of CPU is less, the more so the less there is to go."""
SLACK = 0.25
"""Of a speed: it goes in steps of a second, and is seen from outside."""
BEGUN = 0.99
LEFT = {"cpu": 0.5, "memory": 0.05, "health": 0.05} if SOAK else {"cpu": 0.95, "memory": 0.9, "health": 0.9}
"""What they are to have of their shares in the end."""
PATIENCE = 600.0 if SOAK else 60.0
BALANCE = {"slow_start": 0, "metrics": {"interval": 1.0}}


class Course:
    """The shares that factors leave nodes, as they are seen, each with its time (monotonic)."""

    def __init__(self, there: BalancedCluster, nodes: Mapping[str, str]) -> None:
        """`nodes`: which to look at, by factor."""
        self._there, self._nodes = there, nodes
        self._seen: dict[str, list[tuple[float, float]]] = {factor: [] for factor in nodes}

    async def until(self, holds: Callable[[Mapping[str, float]], bool], what: str) -> None:
        """Look on until the shares are so."""

        async def look() -> bool:
            shown, now = await get_metrics(self._there.stack), time.monotonic()
            shares = {
                factor: shown.get(metric_key("tidevoy_node_factor_share", node=address, factor=factor), 1.0)
                for factor, address in self._nodes.items()
            }
            for factor, share in shares.items():
                self._seen[factor].append((share, now))
            return holds(shares)

        await self._there.stack.wait_until(look, what, PATIENCE)

    def speed(self, factor: str, since: float, until: float) -> float:
        """At which a share has gone from the one to the other, per second."""
        sign = 1 if until > since else -1
        seen = self._seen[factor]
        begun = next(index for index, (share, _) in enumerate(seen) if sign * (share - since) >= 0)
        over = next(index for index, (share, _) in enumerate(seen) if sign * (share - until) >= 0)
        (first, began), (last, ended) = seen[begun], seen[over]
        return abs(last - first) / (ended - began)


async def test_sessions_leave_nodes_in_trouble_and_come_back(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"balance": {**BALANCE, "metrics": {"enabled": False}}, "drain": {"fleet_return": 0}}
    async with (
        run_balanced_cluster(tmp_path, mariadb, signing, nodes=NODES, envoys=1, settings=settings) as there,
        run_crowd() as people,
    ):
        await people.add_clients(there.ports * CLIENTS)
        before = await there.wait_for_counts(is_fair, "fair shares")
        in_trouble = dict(zip(TROUBLES, there.stack.tidb, strict=False))
        sick = {factor: node.address for factor, node in in_trouble.items()}
        for factor, node in in_trouble.items():
            await there.set_node_metrics(node, **TROUBLES[factor])
        # Nobody has looked before: memory that jumps would be taken for memory that is full in a second.
        await reload_settings(there.stack, balance=BALANCE)
        leaving = Course(there, sick)
        await leaving.until(lambda shares: all(shares[a] <= LEFT[a] for a in sick), "shares to fall")

        def are_left(counts: Mapping[str, int]) -> bool:
            well = min(count for address, count in counts.items() if address not in sick.values())
            return all(counts[address] < (before[address] if SOAK else well) for address in sick.values())

        left = await there.wait_for_counts(are_left, "sessions to leave")
        speeds = {factor: leaving.speed(factor, BEGUN, LEFT[factor]) for factor in sick}
        lines = [f"shares fall by {told(speeds)} a second; {told_counts(left, sick)}"]
        assert_documented(speeds)
        if SOAK:
            for node in in_trouble.values():
                await there.set_node_metrics(node, **WELL)
            returning = Course(there, sick)
            await returning.until(lambda shares: min(shares.values()) == 1, "shares to come back")
            back = await there.wait_for_counts(is_fair, "sessions to come back")
            speeds = {factor: returning.speed(factor, LEFT[factor] + 0.05, BEGUN) for factor in sick}
            lines.append(f"they grow by {told(speeds)} a second; {told_counts(back, sick)}")
            assert_documented(speeds)
        assert (people.errors, people.statement_count > 0) == ([], True)
    with capsys.disabled():
        print("", *lines, sep="\n  ", flush=True)


def assert_documented(speeds: Mapping[str, float]) -> None:
    """That shares go as fast as the documentation says."""
    assert all(speed <= SPEED * (1 + SLACK) for speed in speeds.values()), speeds
    assert all(speeds[factor] >= SPEED * (1 - SLACK) for factor in ("memory", "health")), speeds
    assert speeds["cpu"] > 0


def told(speeds: Mapping[str, float]) -> str:
    """Speeds by factor."""
    return ", ".join(f"{speed:.2%} ({factor})" for factor, speed in speeds.items())


def told_counts(counts: Mapping[str, int], sick: Mapping[str, str]) -> str:
    """The sessions of the nodes, those in trouble by what troubles them."""
    others = [str(count) for address, count in counts.items() if address not in sick.values()]
    return ", ".join(
        [*(f"{factor}: {counts[a]}" for factor, a in sick.items()), f"others: {'/'.join(others)}"]
    )
