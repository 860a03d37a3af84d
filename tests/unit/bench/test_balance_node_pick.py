"""How simulated Envoys pick and move: by the rules of the module, as its own tests have them."""

from __future__ import annotations

from random import Random

import pytest

from bench.balance.cases import CASES
from bench.balance.cluster_state import MIN_STAY_SECONDS, SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.node_pick import choose_node
from bench.balance.simulated_modules import MOVE_SECONDS, EnvoyUpdate, SimulatedModules
from bench.balance.tiproxy import TiProxyBalancer


def share(nodes: list[tuple[int, int]], picks: int, *, held: bool) -> list[int]:
    """So many choices among nodes of (added, weight); `held`: the sessions stay. Who got how many."""
    added = [count for count, _ in nodes]
    weights = [weight for _, weight in nodes]
    due = [1 / weight for weight in weights]
    got = [0] * len(nodes)
    for _ in range(picks):
        chosen = choose_node(added, weights, due)
        assert chosen is not None
        due[chosen] += 1 / weights[chosen]
        added[chosen] += held
        got[chosen] += 1
    return got


@pytest.mark.parametrize(
    ("nodes", "picks", "held", "expected"),
    [
        ([(0, 100), (0, 100), (0, 100)], 60, True, [20, 20, 20]),
        ([(0, 200), (0, 100), (0, 100)], 60, True, [30, 15, 15]),
        ([(0, 3), (0, 1)], 8, True, [6, 2]),
        ([(0, 160), (0, 1600), (0, 1600)], 21, False, [1, 10, 10]),
        ([(0, 1), (0, 1), (0, 1)], 9, False, [3, 3, 3]),
        ([(20, 1), (5, 1), (20, 1)], 15, True, [0, 15, 0]),
    ],
)
def test_sessions_are_shared_out_as_by_the_module(
    nodes: list[tuple[int, int]], picks: int, held: bool, expected: list[int]
) -> None:
    assert share(nodes, picks, held=held) == expected


@pytest.mark.parametrize("added", [1, 2])
def test_a_session_that_is_just_ending_does_not_turn_the_weights_round(added: int) -> None:
    assert choose_node([added, 0], [100, 1], [0.5 / 100, 0.5]) == 0


def test_what_may_not_be_chosen_is_not() -> None:
    assert choose_node([0, 9, 0], [0, 1, 0], [0.0, 9.0, 0.0]) == 1
    assert choose_node([0], [0], [0.0]) is None
    assert choose_node([], [], []) is None


def test_sessions_that_a_node_lost_are_not_made_up_for() -> None:
    assert choose_node([-5, 0], [1, 1], [2.0, 1.0]) == 1


class Fleet:
    """Envoys that were told of nodes with these weights."""

    def __init__(self, envoys: int, *weights: int) -> None:
        self.world = SimulatedCluster(envoys)
        for _ in weights:
            self.world.add_node(100)
        self.agenda = EventQueue()
        self.envoys = SimulatedModules(self.world, self.agenda, Random(1))
        self.world.on_count_changed = self.envoys.on_count_changed
        self.envoys.apply_update(EnvoyUpdate(weights))

    def open(self, node: int, count: int, envoy: int = 0) -> None:
        for _ in range(count):
            self.world.open(envoy, node)


def test_turns_of_different_envoys_begin_with_different_nodes() -> None:
    fleet = Fleet(40, 1, 1, 1, 1)
    first = {fleet.envoys.pick_node(envoy) for envoy in range(40)}
    assert first == {0, 1, 2, 3}


def test_counts_begin_anew_with_new_weights_and_only_with_those() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 3)
    assert {fleet.envoys.pick_node(0) for _ in range(9)} == {1}, "node 0 is ahead"
    fleet.world.add_node(100)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100, 100)))
    assert {fleet.envoys.pick_node(0) for _ in range(30)} == {1, 2}, "a node more changes nothing of that"
    fleet.envoys.apply_update(EnvoyUpdate((100, 100, 101)))
    assert {fleet.envoys.pick_node(0) for _ in range(9)} == {0, 1, 2}


def test_as_many_sessions_move_as_were_asked_for_to_those_that_want_them() -> None:
    fleet = Fleet(2, 100, 100, 100)
    fleet.open(0, 10, envoy=0)
    fleet.open(0, 10, envoy=1)
    fleet.envoys.apply_update(
        EnvoyUpdate((100, 100, 100), round=1, outgoing={0: {0: 3}}, incoming={1: {0: 1}, 2: {0: 2}})
    )
    fleet.agenda.run_until(1.5 * MOVE_SECONDS)
    assert fleet.world.totals[0] == 19, "one after the other"
    fleet.agenda.run_until(10.0)
    assert fleet.world.counts == [[7, 1, 2], [10, 0, 0]]
    assert (fleet.world.moves, fleet.world.hasty_moves) == (3, 0)


def test_sessions_stay_when_nobody_wants_them_or_no_more_are_asked_for() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 10)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=1, outgoing={0: {0: 5}}, incoming={1: {0: 2}}))
    fleet.agenda.run_until(5.0)
    assert fleet.world.counts == [[8, 2]]
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2, outgoing={0: {0: 5}}, incoming={1: {0: 5}}))
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2))
    fleet.agenda.run_until(10.0)
    assert fleet.world.counts == [[7, 3]], "one had begun to"


def test_who_has_moved_rests_unless_the_node_is_left() -> None:
    fleet = Fleet(1, 100, 100)
    fleet.open(0, 1)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=1, outgoing={0: {0: 1}}, incoming={1: {0: 1}}))
    fleet.agenda.run_until(1.0)
    back = {1: {0: 1}}, {0: {0: 1}}
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=2, outgoing=back[0], incoming=back[1]))
    fleet.agenda.run_until(2.0)
    assert fleet.world.counts == [[0, 1]]
    fleet.agenda.run_until(2.0 + MIN_STAY_SECONDS)
    fleet.envoys.apply_update(EnvoyUpdate((100, 100), round=3, outgoing=back[0], incoming=back[1]))
    fleet.agenda.run_until(3.0 + MIN_STAY_SECONDS)
    assert fleet.world.counts == [[1, 0]]
    fleet.world.serving[0] = False
    fleet.envoys.apply_update(EnvoyUpdate((0, 100), frozenset({0})))
    fleet.agenda.run_until(4.0 + MIN_STAY_SECONDS)
    assert fleet.world.counts == [[0, 1]]
    assert (fleet.world.evictions, fleet.world.hasty_moves) == (1, 0)


def test_those_that_leave_a_node_go_by_the_weights_of_the_others() -> None:
    fleet = Fleet(300, 100, 100, 300)
    for envoy in range(300):
        fleet.open(0, 1, envoy)
    fleet.world.serving[0] = False
    fleet.envoys.apply_update(EnvoyUpdate((0, 100, 300), frozenset({0})))
    fleet.agenda.run_until(2 * MOVE_SECONDS)
    left, light, heavy = fleet.world.totals
    assert left == 0
    assert 20 < light < 110
    assert heavy == 300 - light


def tiproxy(*counts: int) -> tuple[TiProxyBalancer, SimulatedCluster, EventQueue]:
    """One that has so many connections on its nodes."""
    world, agenda = SimulatedCluster(1), EventQueue()
    for node, count in enumerate(counts):
        world.add_node(100)
        for _ in range(count):
            world.open(0, node)
    return TiProxyBalancer(CASES["a"], world, agenda, Random(1)), world, agenda


def test_tiproxy_picks_any_node_that_is_not_to_give_connections_away() -> None:
    balancer, world, _ = tiproxy(12, 10, 9, 13)
    assert {balancer.pick_node(0) for _ in range(100)} == {0, 1, 2}, "12 is 1.2 times 9 + 1"
    world.serving[2] = False
    assert {balancer.pick_node(0) for _ in range(100)} == {0, 1, 3}


def test_tiproxy_moves_one_connection_whenever_its_interval_has_passed() -> None:
    balancer, world, agenda = tiproxy(12, 0)
    moved = []
    for second in range(30):
        agenda.run_until(float(second))
        balancer.on_second_passed()
        moved.append(world.moves)
    # (12 + 0 + 1) / 2.2 - 1 connections in 120 s are one in 24.5 s; after the first (11, 1): one in 33.6 s.
    assert moved == [1] * 30
    agenda.run_until(34.0)
    balancer.on_second_passed()
    assert world.counts == [[10, 2]]


def test_tiproxy_moves_nothing_below_its_ratio() -> None:
    balancer, world, _ = tiproxy(12, 9)
    balancer.on_second_passed()
    assert world.moves == 0


def test_tiproxy_leaves_a_node_within_five_seconds() -> None:
    balancer, world, _ = tiproxy(12, 20, 20)
    world.serving[0] = False
    balancer.on_node_drained(0)
    for _ in range(6):
        balancer.on_second_passed()
    assert world.counts == [[0, 26, 26]]
    assert (world.evictions, world.moves) == (12, 0)
