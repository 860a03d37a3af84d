"""Simulation of a fleet: no session is lost, runs are reproducible, better-informed balancers do better."""

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
def summary_of(case: Case, balancer: str) -> SimulationSummary:
    return summarize(simulation(case, balancer).run())


@pytest.mark.parametrize("balancer", BALANCERS)
def test_every_session_is_on_exactly_one_node(balancer: str) -> None:
    run = simulation(EVENTFUL, balancer)
    run.run()
    cluster = run.cluster
    assert cluster.nodes == EVENTFUL.nodes + 2
    for node in range(cluster.nodes):
        held = [[*cluster.sessions(envoy, node)] for envoy in range(cluster.envoys)]
        assert [len(sessions) for sessions in held] == [counts[node] for counts in cluster.counts]
        assert all(s.node == node and not s.is_over for sessions in held for s in sessions)
        assert cluster.totals[node] == cluster.direct_sessions[node] + sum(map(len, held))
    assert sum(cluster.totals) > 0


@pytest.mark.parametrize("balancer", [TIDEVOY, "tiproxy", "ideal"])
def test_drained_nodes_become_empty(balancer: str) -> None:
    run = simulation(EVENTFUL, balancer)
    record = run.run()
    drained = [node for node in range(run.cluster.nodes) if not run.cluster.serving[node]]
    assert len(drained) == 2
    assert [run.cluster.totals[node] for node in drained] == [0, 0]
    assert run.cluster.drain_migrations > 0
    assert [observed.change.name for observed in record.changes] == ["2 nodes join", "2 nodes leave"]


def test_result_depends_only_on_the_seed() -> None:
    first, second, other_seed = (simulation(EVENTFUL, TIDEVOY, seed).run().imbalances for seed in (1, 1, 2))
    assert first == second
    assert first != other_seed


def test_all_balancers_get_the_same_sessions() -> None:
    assert len({summary_of(SMALL, balancer).record.sessions for balancer in BALANCERS}) == 1


def test_better_informed_balancers_perform_better() -> None:
    ideal, tidevoy, least_connections = (
        summary_of(SMALL, balancer).mean for balancer in ("ideal", TIDEVOY, LEAST_CONNECTIONS)
    )
    assert ideal < tidevoy < least_connections
    assert ideal < 1.06
    assert least_connections > 1.1


def test_migrated_session_stays_for_a_minute() -> None:
    tidevoy, ideal = summary_of(SMALL, TIDEVOY).record, summary_of(SMALL, "ideal").record
    assert tidevoy.early_moves == 0
    assert ideal.early_moves > 0
    assert ideal.shortest_stay < 60


def test_special_nodes_have_their_slowness_and_weight() -> None:
    cluster = simulation(EVENTFUL, LEAST_CONNECTIONS).cluster
    assert cluster.capacities == [100] * 5 + [50]
    assert cluster.slowness == [1.0] * 4 + [3.0, 1.0]


def test_lifetimes_have_the_requested_mean() -> None:
    lifetimes = LifetimeDistribution(100.0, Random(1))
    drawn = [lifetimes.sample() for _ in range(40_000)]
    assert 90 < sum(drawn) / len(drawn) < 110
    assert max(drawn) > 20 * 100, "the tail is heavy"


def test_session_count_matches_the_case() -> None:
    assert 0.8 * SMALL.sessions < summary_of(SMALL, LEAST_CONNECTIONS).record.sessions < 1.2 * SMALL.sessions
    assert sum(CASES["d"].sessions for _ in range(2)) == 200_000


def test_event_queue_runs_due_actions_in_order() -> None:
    event_queue, done = EventQueue(), list[tuple[float, str]]()

    def note(what: str) -> None:
        done.append((event_queue.now, what))

    event_queue.at(2.0, note, "second")
    event_queue.at(1.0, note, "first")
    event_queue.at(2.0, note, "third")
    event_queue.at(5.0, note, "too late")
    event_queue.run_until(5.0)
    assert done == [(1.0, "first"), (2.0, "second"), (2.0, "third")]
    assert event_queue.now == 5.0
