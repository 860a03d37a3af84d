"""TiProxy's balancing by connection count: one TiProxy per Envoy, which knows only its own connections.

Modeled after pingcap/tiproxy `pkg/balance/factor/factor_conn.go`, `factor_status.go`, `factor_balance.go` and
`pkg/balance/router/group.go`, `router_score.go`: routing `prefer-idle`, the policy `connection`, the default
count ratio and speeds. Here migrations take no time, and it checks once a second rather than every 10 ms.
It has no weights.
"""

from __future__ import annotations

from random import Random

from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue

_MAX_CONNECTION_RATIO = 1.2  # of connections; above it, connections migrate
_REBALANCE_SECONDS = 120.0  # time over which a difference is balanced
_DRAIN_SECONDS = 5.0  # time in which a drained node is emptied


class TiProxyBalancer:
    """All TiProxies of the fleet, each working independently."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        self._cluster = cluster
        self._event_queue = event_queue
        self._random = random
        self._moved_at = [float("-inf")] * cluster.envoys
        self._moves_per_second: dict[tuple[int, int], int] = {}  # by proxy and node

    def pick_node(self, envoy: int) -> int:
        """Pick any node from which no connection would migrate to the best node."""
        counts, serving = self._cluster.counts[envoy], self._cluster.serving
        nodes = [node for node in range(len(counts)) if serving[node]]
        least = min(counts[node] for node in nodes)
        return self._random.choice(
            [node for node in nodes if counts[node] <= (least + 1) * _MAX_CONNECTION_RATIO]
        )

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """Nothing to do: the cluster holds the counts."""

    def on_node_joined(self, node: int) -> None:
        """Nothing to do: the new node has the fewest connections."""

    def on_node_drained(self, node: int) -> None:
        """Schedule the migration of all its connections within five seconds."""
        for envoy in range(self._cluster.envoys):
            if count := self._cluster.counts[envoy][node]:
                self._moves_per_second[envoy, node] = max(1, round(count / _DRAIN_SECONDS))

    def on_second_passed(self) -> None:
        """Let each proxy migrate connections if needed."""
        for (envoy, node), count in self._moves_per_second.items():
            self._move(envoy, node, count)
        for envoy in range(self._cluster.envoys):
            self._even_out(envoy)

    def _even_out(self, envoy: int) -> None:
        counts = self._cluster.counts[envoy]
        most = max(counts)
        if most <= _MAX_CONNECTION_RATIO:
            return
        serving = self._cluster.serving
        nodes = [node for node in range(len(counts)) if serving[node]]
        busiest = max(nodes, key=counts.__getitem__)
        fewest = min(nodes, key=counts.__getitem__)
        most, least = counts[busiest], counts[fewest]
        if most <= (least + 1) * _MAX_CONNECTION_RATIO:
            return
        speed = ((most + least + 1) / (1 + _MAX_CONNECTION_RATIO) - (least + 1)) / _REBALANCE_SECONDS
        if speed > 0 and self._event_queue.now - self._moved_at[envoy] >= 1 / speed:
            self._moved_at[envoy] = self._event_queue.now
            self._move(envoy, busiest, max(1, int(speed)))

    def _move(self, envoy: int, node: int, count: int) -> None:
        for session in self._cluster.oldest(envoy, node, count):
            counts, serving = self._cluster.counts[envoy], self._cluster.serving
            nodes = [other for other in range(len(counts)) if serving[other]]
            least = min(counts[other] for other in nodes)
            target = self._random.choice([other for other in nodes if counts[other] == least])
            self._cluster.move(session, target, self._event_queue.now)
