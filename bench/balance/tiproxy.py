"""TiProxy's balance by connection count: one in each Envoy's place, which knows its own connections alone.

Modelled after pingcap/tiproxy `pkg/balance/factor/factor_conn.go`, `factor_status.go`, `factor_balance.go`
and `pkg/balance/router/group.go`, `router_score.go`: routing `prefer-idle`, the policy `connection`, the
count ratio and speeds of its defaults. Moves take no time here, and it looks once a second rather than each
10 ms. It knows no weights.
"""

from __future__ import annotations

from random import Random

from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue

_MAX_CONNECTION_RATIO = 1.2  # of connections, above which they are moved
_REBALANCE_SECONDS = 120.0  # seconds over which a difference is evened out
_DRAIN_SECONDS = 5.0  # seconds in which a node that is not to serve any more is left


class TiProxyBalancer:
    """All of the fleet, each by itself."""

    def __init__(self, case: Case, world: SimulatedCluster, agenda: EventQueue, random: Random) -> None:
        self._world = world
        self._agenda = agenda
        self._random = random
        self._moved_at = [float("-inf")] * world.envoys
        self._moves_per_second: dict[
            tuple[int, int], int
        ] = {}  # by proxy and node, how many move each second

    def pick_node(self, envoy: int) -> int:
        """Any of those from which none would be moved to the best one."""
        counts, serving = self._world.counts[envoy], self._world.serving
        nodes = [node for node in range(len(counts)) if serving[node]]
        least = min(counts[node] for node in nodes)
        return self._random.choice(
            [node for node in nodes if counts[node] <= (least + 1) * _MAX_CONNECTION_RATIO]
        )

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """The world has the counts."""

    def on_node_joined(self, node: int) -> None:
        """It is the best one now."""

    def on_node_drained(self, node: int) -> None:
        """Its connections are moved within five seconds."""
        for envoy in range(self._world.envoys):
            if count := self._world.counts[envoy][node]:
                self._moves_per_second[envoy, node] = max(1, round(count / _DRAIN_SECONDS))

    def on_second_passed(self) -> None:
        """Each proxy moves connections when it has to."""
        for (envoy, node), count in self._moves_per_second.items():
            self._move(envoy, node, count)
        for envoy in range(self._world.envoys):
            self._even_out(envoy)

    def _even_out(self, envoy: int) -> None:
        counts = self._world.counts[envoy]
        most = max(counts)
        if most <= _MAX_CONNECTION_RATIO:
            return
        serving = self._world.serving
        nodes = [node for node in range(len(counts)) if serving[node]]
        busiest = max(nodes, key=counts.__getitem__)
        fewest = min(nodes, key=counts.__getitem__)
        most, least = counts[busiest], counts[fewest]
        if most <= (least + 1) * _MAX_CONNECTION_RATIO:
            return
        speed = ((most + least + 1) / (1 + _MAX_CONNECTION_RATIO) - (least + 1)) / _REBALANCE_SECONDS
        if speed > 0 and self._agenda.now - self._moved_at[envoy] >= 1 / speed:
            self._moved_at[envoy] = self._agenda.now
            self._move(envoy, busiest, max(1, int(speed)))

    def _move(self, envoy: int, node: int, count: int) -> None:
        for session in self._world.oldest(envoy, node, count):
            counts, serving = self._world.counts[envoy], self._world.serving
            nodes = [other for other in range(len(counts)) if serving[other]]
            least = min(counts[other] for other in nodes)
            target = self._random.choice([other for other in nodes if counts[other] == least])
            self._world.move(session, target, self._agenda.now)
