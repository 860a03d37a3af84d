"""TiProxy's balancing by connection count. A TiProxy replaces each Envoy, and sees only its own connections.

Modeled after pingcap/tiproxy `pkg/balance/factor/factor_conn.go`, `factor_status.go`, `factor_balance.go` and
`pkg/balance/router/group.go`, `router_score.go`: routing `prefer-idle`, the policy `connection`, the default
count ratio and speeds. Here, migrations take no time, and TiProxy checks once a second, not every 10 ms.
TiProxy has no weights.
"""

from __future__ import annotations

from random import Random

from bench.balance.balancer import Balancer
from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue

_MAX_CONNECTION_RATIO = 1.2  # between two nodes; connections migrate above this ratio
_REBALANCE_SECONDS = 120.0  # time over which a difference is balanced
_DRAIN_SECONDS = 5.0  # time in which a drained node is emptied


class TiProxyBalancer(Balancer):
    """All TiProxies of the fleet, each working independently."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        super().__init__(case, cluster, event_queue, random)
        self._moved_at = [float("-inf")] * cluster.envoys
        self._moves_per_second: dict[tuple[int, int], int] = {}  # by TiProxy and node

    def pick_node(self, envoy: int) -> int:
        """Pick a random node among those from which TiProxy would not migrate connections."""
        counts = self._serving_counts(envoy)
        limit = (min(counts.values()) + 1) * _MAX_CONNECTION_RATIO
        return self._random.choice([node for node, count in counts.items() if count <= limit])

    def on_node_drained(self, node: int) -> None:
        """Schedule the migration of all connections of the node within five seconds."""
        for envoy in range(self._cluster.envoys):
            if count := self._cluster.counts[envoy][node]:
                self._moves_per_second[envoy, node] = max(1, round(count / _DRAIN_SECONDS))

    def on_second_passed(self) -> None:
        for (envoy, node), count in self._moves_per_second.items():
            self._move(envoy, node, count)
        for envoy in range(self._cluster.envoys):
            self._even_out(envoy)

    def _serving_counts(self, envoy: int) -> dict[int, int]:
        counts, serving = self._cluster.counts[envoy], self._cluster.serving
        return {node: count for node, count in enumerate(counts) if serving[node]}

    def _even_out(self, envoy: int) -> None:
        if max(self._cluster.counts[envoy]) <= _MAX_CONNECTION_RATIO:
            return
        counts = self._serving_counts(envoy)
        busiest = max(counts, key=counts.__getitem__)
        most, least = counts[busiest], min(counts.values())
        if most <= (least + 1) * _MAX_CONNECTION_RATIO:
            return
        speed = ((most + least + 1) / (1 + _MAX_CONNECTION_RATIO) - (least + 1)) / _REBALANCE_SECONDS
        if speed > 0 and self._event_queue.now - self._moved_at[envoy] >= 1 / speed:
            self._moved_at[envoy] = self._event_queue.now
            self._move(envoy, busiest, max(1, int(speed)))

    def _move(self, envoy: int, node: int, count: int) -> None:
        for session in self._cluster.oldest(envoy, node, count):
            counts = self._serving_counts(envoy)
            least = min(counts.values())
            target = self._random.choice([other for other, count in counts.items() if count == least])
            self._cluster.move(session, target, self._event_queue.now)
