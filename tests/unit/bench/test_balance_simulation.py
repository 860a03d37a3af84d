"""The simulation of a fleet: nothing is lost, chance is the same each time, who sees more does better."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from bench.balance.cases import CASES, Case, TopologyChange
from bench.balance.event_queue import EventQueue
from bench.balance.simulation import BALANCERS, LEAST_CONNECTIONS, TIDEVOY, Simulation
from bench.balance.summary import SimulationSummary, summarize
from bench.balance.workload import FILL_SECONDS, LifetimeDistribution

SMALL = Case("a", "small", envoys=60, nodes=6, sessions=120, lifetime=60.0)
EVENTFUL = replace(
    SMALL,
    envoys=20,
    direct_fraction=0.1,
    direct_nodes=2,
    pool_close_interval=20.0,
    skew=1.0,
    slow_nodes=1,
    half_weight_nodes=1,
    report_delay_spread=2.0,
    silent_envoys=3,
    changes=(TopologyChange(0.2, joins=2), TopologyChange(0.6, leaves=2)),
)
SECONDS = 60


def simulation(case: Case, balancer: str, seed: int = 1) -> Simulation:
    return Simulation(case, balancer, SECONDS, seed, warm_up=FILL_SECONDS + 30)


@cache
def found(case: Case, balancer: str) -> SimulationSummary:
    return summarize(simulation(case, balancer).run())


@pytest.mark.parametrize("balancer", BALANCERS)
def test_every_session_is_on_one_node_whatever_happens(balancer: str) -> None:
    one = simulation(EVENTFUL, balancer)
    one.run()
    world = one.world
    assert world.nodes == EVENTFUL.nodes + 2
    for node in range(world.nodes):
        held = [[*world.sessions(envoy, node)] for envoy in range(world.envoys)]
        assert [len(sessions) for sessions in held] == [counts[node] for counts in world.counts]
        assert all(s.node == node and not s.is_over for sessions in held for s in sessions)
        assert world.totals[node] == world.direct_sessions[node] + sum(map(len, held))
    assert sum(world.totals) > 0


@pytest.mark.parametrize("balancer", [TIDEVOY, "tiproxy", "ideal"])
def test_drained_nodes_are_left(balancer: str) -> None:
    one = simulation(EVENTFUL, balancer)
    record = one.run()
    drained = [node for node in range(one.world.nodes) if not one.world.serving[node]]
    assert len(drained) == 2
    assert [one.world.totals[node] for node in drained] == [0, 0]
    assert one.world.evictions > 0
    assert [event.change.name for event in record.events] == ["2 nodes join", "2 nodes leave"]


def test_the_same_seed_gives_the_same_and_another_does_not() -> None:
    first, second, other = (simulation(EVENTFUL, TIDEVOY, seed).run().imbalances for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_all_balancers_get_the_same_sessions() -> None:
    assert len({found(SMALL, balancer).sessions for balancer in BALANCERS}) == 1


def test_who_sees_more_does_better() -> None:
    ideal, ours, alone = (found(SMALL, balancer).mean for balancer in ("ideal", TIDEVOY, LEAST_CONNECTIONS))
    assert ideal < ours < alone
    assert ideal < 1.06
    assert alone > 1.1


def test_a_session_that_has_moved_stays_for_a_minute() -> None:
    ours, ideal = found(SMALL, TIDEVOY), found(SMALL, "ideal")
    assert ours.hasty_moves == 0
    assert ideal.hasty_moves > 0
    assert ideal.shortest_stay is not None
    assert ideal.shortest_stay < 60


def test_slow_nodes_and_those_of_half_the_weight_are_what_they_say() -> None:
    world = simulation(EVENTFUL, LEAST_CONNECTIONS).world
    assert world.capacities == [100] * 5 + [50]
    assert world.slowness == [1.0] * 4 + [3.0, 1.0]


def test_lifetimes_have_the_mean_that_was_asked_for() -> None:
    lifetimes = LifetimeDistribution(100.0, Random(1))
    drawn = [lifetimes.sample() for _ in range(40_000)]
    assert 90 < sum(drawn) / len(drawn) < 110
    assert max(drawn) > 20 * 100, "the tail is heavy"


def test_there_are_as_many_sessions_as_the_case_says() -> None:
    assert 0.8 * SMALL.sessions < found(SMALL, LEAST_CONNECTIONS).sessions < 1.2 * SMALL.sessions
    assert sum(CASES["d"].sessions for _ in range(2)) == 200_000


def test_an_agenda_is_done_in_order_and_up_to_its_end() -> None:
    agenda, done = EventQueue(), list[tuple[float, str]]()

    def note(what: str) -> None:
        done.append((agenda.now, what))

    agenda.at(2.0, note, "second")
    agenda.at(1.0, note, "first")
    agenda.at(2.0, note, "third")
    agenda.at(5.0, note, "too late")
    agenda.run_until(5.0)
    assert done == [(1.0, "first"), (2.0, "second"), (2.0, "third")]
    assert agenda.now == 5.0
