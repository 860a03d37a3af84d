"""Simulated Envoys pick nodes and migrate sessions like Tidevoy's module; the cases are from its tests."""

from __future__ import annotations

from random import Random

import pytest

from bench.balance.cases import CASES
from bench.balance.cluster_state import MIN_STAY_SECONDS, SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.simulated_modules import MOVE_SECONDS, EnvoyUpdate, SimulatedModules, choose_node
from bench.balance.tiproxy import TiProxyBalancer


def picks_per_node(nodes: list[tuple[int, int]], picks: int, *, adds_session: bool) -> list[int]:
    """Pick `picks` times among nodes (added sessions, weight). Return the number of picks per node.

    `adds_session`: whether each pick adds a session.
    """
    added = [count for count, _ in nodes]
    weights = [weight for _, weight in nodes]
    next_turns = [1 / weight for weight in weights]
    picks_by_node = [0] * len(nodes)
    for _ in range(picks):
        chosen = choose_node(added, weights, next_turns)
        assert chosen is not None
        next_turns[chosen] += 1 / weights[chosen]
        added[chosen] += adds_session
        picks_by_node[chosen] += 1
    return picks_by_node


@pytest.mark.parametrize(
    ("nodes", "picks", "adds_session", "expected"),
    [
        ([(0, 100), (0, 100), (0, 100)], 60, True, [20, 20, 20]),
        ([(0, 200), (0, 100), (0, 100)], 60, True, [30, 15, 15]),
        ([(0, 3), (0, 1)], 8, True, [6, 2]),
        ([(0, 160), (0, 1600), (0, 1600)], 21, False, [1, 10, 10]),
        ([(0, 1), (0, 1), (0, 1)], 9, False, [3, 3, 3]),
        ([(20, 1), (5, 1), (20, 1)], 15, True, [0, 15, 0]),
    ],
)
def test_pick_matches_the_module(
    nodes: list[tuple[int, int]], picks: int, adds_session: bool, expected: list[int]
) -> None:
    assert picks_per_node(nodes, picks, adds_session=adds_session) == expected


@pytest.mark.parametrize("added", [1, 2])
def test_ending_session_does_not_invert_the_weights(added: int) -> None:
    assert choose_node([added, 0], [100, 1], [0.5 / 100, 0.5]) == 0


def test_nodes_without_weight_are_never_chosen() -> None:
    assert choose_node([0, 9, 0], [0, 1, 0], [0.0, 9.0, 0.0]) == 1
    assert choose_node([0], [0], [0.0]) is None
    assert choose_node([], [], []) is None


def test_lost_sessions_are_not_compensated() -> None:
    assert choose_node([-5, 0], [1, 1], [2.0, 1.0]) == 1


class Fleet:
    """Simulated Envoys that have received nodes with these weights."""

    def __init__(self, envoys: int, *weights: int) -> None:
        self.cluster = SimulatedCluster(envoys)
        for _ in weights:
            self.cluster.add_node(100)
        self.event_queue = EventQueue()
        self.envoys = SimulatedModules(self.cluster, self.event_queue, Random(1))
        self.cluster.on_count_changed = self.envoys.on_count_changed
        self.envoys.apply_update(EnvoyUpdate(weights))

    def open(self, node: int, count: int, envoy: int = 0) -> None:
        for _ in range(count):
            self.cluster.open(envoy, node)


def test_envoys_start_turns_at_different_nodes() -> None:
    fleet = Fleet(40, 1, 1, 1, 1)
    first = {fleet.envoys.pick_node(envoy) for envoy in range(40)}
    assert first == {0, 1, 2, 3}


def test_counts_reset_only_on_new_weights() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 3)
    assert {fleet.envoys.pick_node(0) for _ in range(9)} == {1}, "node 0 is ahead"
    fleet.cluster.add_node(100)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100, 100)))
    assert {fleet.envoys.pick_node(0) for _ in range(30)} == {1, 2}, (
        "an additional node does not reset the counts"
    )
    fleet.envoys.apply_update(EnvoyUpdate((100, 100, 101)))
    assert {fleet.envoys.pick_node(0) for _ in range(9)} == {0, 1, 2}


def test_requested_number_of_sessions_migrates() -> None:
    fleet = Fleet(2, 100, 100, 100)
    fleet.open(0, 10, envoy=0)
    fleet.open(0, 10, envoy=1)
    fleet.envoys.apply_update(
        EnvoyUpdate((100, 100, 100), round=1, outgoing={0: {0: 3}}, incoming={1: {0: 1}, 2: {0: 2}})
    )
    fleet.event_queue.run_until(1.5 * MOVE_SECONDS)
    assert fleet.cluster.totals[0] == 19, "one session at a time"
    fleet.event_queue.run_until(10.0)
    assert fleet.cluster.counts == [[7, 1, 2], [10, 0, 0]]
    assert (fleet.cluster.moves, fleet.cluster.early_moves) == (3, 0)


def test_sessions_stay_without_target_or_request() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 10)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=1, outgoing={0: {0: 5}}, incoming={1: {0: 2}}))
    fleet.event_queue.run_until(5.0)
    assert fleet.cluster.counts == [[8, 2]]
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2, outgoing={0: {0: 5}}, incoming={1: {0: 5}}))
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2))
    fleet.event_queue.run_until(10.0)
    assert fleet.cluster.counts == [[7, 3]], "one migration was in progress"


def test_migrated_session_stays_unless_its_node_drains() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 1)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=1, outgoing={0: {0: 1}}, incoming={1: {0: 1}}))
    fleet.event_queue.run_until(1.0)
    back = {1: {0: 1}}, {0: {0: 1}}
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2, outgoing=back[0], incoming=back[1]))
    fleet.event_queue.run_until(2.0)
    assert fleet.cluster.counts == [[0, 1]]
    fleet.event_queue.run_until(2.0 + MIN_STAY_SECONDS)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=3, outgoing=back[0], incoming=back[1]))
    fleet.event_queue.run_until(3.0 + MIN_STAY_SECONDS)
    assert fleet.cluster.counts == [[1, 0]]
    fleet.cluster.serving[0] = False
    fleet.envoys.apply_update(EnvoyUpdate((0, 100), frozenset({0})))
    fleet.event_queue.run_until(4.0 + MIN_STAY_SECONDS)
    assert fleet.cluster.counts == [[0, 1]]
    assert (fleet.cluster.drain_migrations, fleet.cluster.early_moves) == (1, 0)


def test_drained_sessions_follow_the_weights() -> None:
    fleet = Fleet(300, 100, 100, 300)
    for envoy in range(300):
        fleet.open(0, 1, envoy)
    fleet.cluster.serving[0] = False
    fleet.envoys.apply_update(EnvoyUpdate((0, 100, 300), frozenset({0})))
    fleet.event_queue.run_until(2 * MOVE_SECONDS)
    left, light, heavy = fleet.cluster.totals
    assert left == 0
    assert 20 < light < 110
    assert heavy == 300 - light


def tiproxy(*counts: int) -> tuple[TiProxyBalancer, SimulatedCluster, EventQueue]:
    """Return a TiProxy with these numbers of connections on its nodes."""
    cluster, event_queue = SimulatedCluster(1), EventQueue()
    for node, count in enumerate(counts):
        cluster.add_node(100)
        for _ in range(count):
            cluster.open(0, node)
    return TiProxyBalancer(CASES["a"], cluster, event_queue, Random(1)), cluster, event_queue


def test_tiproxy_picks_any_node_below_the_ratio() -> None:
    balancer, cluster, _ = tiproxy(12, 10, 9, 13)
    assert {balancer.pick_node(0) for _ in range(100)} == {0, 1, 2}, "12 is 1.2 times 9 + 1"
    cluster.serving[2] = False
    assert {balancer.pick_node(0) for _ in range(100)} == {0, 1, 3}


def test_tiproxy_migrates_one_connection_per_interval() -> None:
    balancer, cluster, event_queue = tiproxy(12, 0)
    moved = []
    for second in range(30):
        event_queue.run_until(float(second))
        balancer.on_second_passed()
        moved.append(cluster.moves)
    # The first migration is immediate. Then the counts are (11, 1), and (11 + 1 + 1) / 2.2 - (1 + 1)
    # connections migrate in 120 s: one in 30.7 s.
    assert moved == [1] * 30
    event_queue.run_until(34.0)
    balancer.on_second_passed()
    assert cluster.counts == [[10, 2]]


def test_tiproxy_migrates_nothing_below_its_ratio() -> None:
    balancer, cluster, _ = tiproxy(12, 9)
    balancer.on_second_passed()
    assert cluster.moves == 0


def test_tiproxy_empties_a_drained_node_within_five_seconds() -> None:
    balancer, cluster, _ = tiproxy(12, 20, 20)
    cluster.serving[0] = False
    balancer.on_node_drained(0)
    for _ in range(6):
        balancer.on_second_passed()
    assert cluster.counts == [[0, 26, 26]]
    assert (cluster.drain_migrations, cluster.moves) == (12, 0)
