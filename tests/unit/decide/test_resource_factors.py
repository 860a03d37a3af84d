"""Factors of health, memory and CPU: which nodes they reduce, how fast, and when they do not apply."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.decide.balance import resource_factors
from controlplane.decide.balance.locality import serving_by_group
from controlplane.decide.balance.resource_factors import MIN_SHARE, advance_factors, combined_share
from controlplane.decide.inputs import Inputs
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import EMPTY_MAP, Node, Source, State
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

NOW = 10_000.0
A, B, C, D, E = "abcde"
FACTORS = ("health", "memory", "cpu")


def serving_node(address: str, weight: int = 100, **more: object) -> NodePlan:
    plan = NodePlan(Node(address, Source.STATIC, weight=weight), State.ACTIVE, "", 0.0, EdsHealth.HEALTHY)
    return replace(plan, **more)  # type: ignore[arg-type]


def normal(at: float = NOW, **other: MetricValue | float | None) -> NodeMetrics:
    low, zero = MetricValue(0.3, at), MetricValue(0, at)
    metrics = NodeMetrics(cpu=low, memory=low, pd_failures=zero, tikv_failures=zero)
    return replace(metrics, **other)  # type: ignore[arg-type]


def abnormal(name: str, at: float = NOW) -> NodeMetrics:
    """Return metrics for which the factor `name` reduces a node's share."""
    return {
        "health": normal(at, pd_failures=MetricValue(0.6, at)),
        "memory": normal(at, memory=MetricValue(0.8, at)),
        "cpu": normal(at, cpu=MetricValue(0.95, at)),
    }[name]


def fleet(*names: str) -> dict[str, NodePlan]:
    return {name: serving_node(name) for name in names}


class FactorSimulation:
    """Advances the factors of a fixed set of nodes in steps of one second, with the metrics of each step."""

    def __init__(self, nodes: Mapping[str, NodePlan], policy: Policy | None = None) -> None:
        self.now, self.nodes, self.policy = NOW, nodes, policy or Policy()
        self.factors: dict[str, Mapping[str, Factor]] = {}

    def plan(self) -> Plan:
        nodes = {a: replace(p, factors=self.factors.get(a, EMPTY_MAP)) for a, p in self.nodes.items()}
        return Plan(nodes, weights_computed_at=self.now)

    def step(
        self, node_metrics: Mapping[str, NodeMetrics], seconds: float = 1.0
    ) -> Mapping[str, Mapping[str, Factor]]:
        """Advance one step. The times of the metrics advance too, so they are as old as at `NOW`."""
        previous = self.plan()
        self.now += seconds
        aged = {a: _with_later_times(metrics, self.now - NOW) for a, metrics in node_metrics.items()}
        self.factors = advance_factors(
            self.nodes, Inputs(previous, Facts(node_metrics=aged), self.policy, self.now)
        )
        return self.factors

    def share(self, address: str) -> float:
        """Return the product of the factors of a node."""
        return combined_share(self.factors.get(address, EMPTY_MAP))


def _with_later_times(metrics: NodeMetrics, seconds: float) -> NodeMetrics:
    def later(reading: MetricValue | None) -> MetricValue | None:
        return None if reading is None else MetricValue(reading.value, reading.at + seconds)

    return replace(
        metrics,
        cpu=later(metrics.cpu),
        memory=later(metrics.memory),
        pd_failures=later(metrics.pd_failures),
        tikv_failures=later(metrics.tikv_failures),
    )


# --- rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["health", "memory"])
def test_share_falls_and_recovers_within_a_minute(name: str) -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    others = {A: normal(), B: normal(), C: normal()}
    simulation.step(others | {A: abnormal(name)})
    assert simulation.factors.keys() == {A}
    assert simulation.factors[A][name].target == MIN_SHARE
    assert simulation.share(A) == pytest.approx(1 - 1 / 60)
    for _ in range(58):
        simulation.step(others | {A: abnormal(name)})
    assert simulation.share(A) == pytest.approx(MIN_SHARE)
    for _ in range(30):
        simulation.step(others)
    assert simulation.share(A) == pytest.approx(MIN_SHARE + 0.5)
    assert (simulation.factors[A][name].level, simulation.factors[A][name].reason) == (0, "")
    for _ in range(30):
        simulation.step(others)
    assert simulation.factors == {}


def test_share_falls_in_ten_seconds_if_memory_is_urgent() -> None:
    simulation = FactorSimulation(fleet(A, B))
    urgent = replace(abnormal("memory"), memory_growth=0.01)
    simulation.step({A: urgent, B: normal()})
    assert simulation.share(A) == pytest.approx(0.9)
    for _ in range(9):
        simulation.step({A: urgent, B: normal()})
    assert simulation.share(A) == pytest.approx(MIN_SHARE)


def test_memory_level_one_halves_the_share() -> None:
    simulation = FactorSimulation(fleet(A, B))
    for _ in range(40):
        simulation.step({A: normal(memory=MetricValue(0.65, NOW)), B: normal()})
    assert simulation.share(A) == pytest.approx(0.5)
    assert simulation.factors[A]["memory"].level == 1


def test_busy_node_shrinks_toward_the_group_mean() -> None:
    simulation = FactorSimulation(fleet(A, B, C, D))
    simulation.step({A: normal(cpu=MetricValue(0.9, NOW)), B: normal(), C: normal(), D: normal()})
    factor = simulation.factors[A]["cpu"]
    mean = (0.9 + 3 * 0.3) / 4
    assert simulation.factors.keys() == {A}
    assert factor.target == pytest.approx(mean / 0.9)
    assert factor.share == pytest.approx(1 - (1 - mean / 0.9) / 60)
    assert (factor.level, factor.reason) == (1, "its CPU is at 90%, where 45% is normal in its group")


@pytest.mark.parametrize("name", ["health", "memory"])
def test_nodes_with_another_problem_do_not_count_for_the_mean_cpu(name: str) -> None:
    simulation, high = FactorSimulation(fleet(A, B, C, D)), MetricValue(0.95, NOW)
    others = {B: normal(cpu=MetricValue(0.55, NOW)), C: normal(), D: normal()}
    for _ in range(5):
        simulation.step(others | {A: replace(abnormal(name), cpu=high)})
    assert simulation.factors[B]["cpu"].target < 1
    simulation.step(others | {A: normal(cpu=high)})
    assert simulation.factors[A][name].share < 1  # it still recovers
    assert simulation.factors[B]["cpu"].target == 1


def test_node_that_stays_busy_falls_to_minimum_and_recovers() -> None:
    simulation = FactorSimulation(fleet(A, B, C, D))
    others = {B: normal(), C: normal(), D: normal()}
    past = 1.0
    for _ in range(480):
        simulation.step(others | {A: abnormal("cpu")})
        assert past - 0.02 <= simulation.share(A) <= past
        past = simulation.share(A)
    assert past == pytest.approx(MIN_SHARE)
    factor = simulation.step(others | {A: normal(cpu=MetricValue(0.02, NOW))})[A]["cpu"]
    assert (factor.level, factor.reason) == (1, "its CPU is at 2% with a reduced share")
    for _ in range(120):
        simulation.step(others | {A: normal(cpu=MetricValue(0.02, NOW))})
    assert simulation.factors == {}


@pytest.mark.parametrize(("pause", "counted"), [(0.0, 0.0), (-5.0, 0.0), (7.0, 7.0), (3600.0, 10.0)])
def test_step_is_limited_after_pause_or_clock_change(pause: float, counted: float) -> None:
    simulation = FactorSimulation(fleet(A, B))
    simulation.step({A: abnormal("health"), B: normal()}, pause)
    assert simulation.share(A) == pytest.approx(1 - counted / 60)


# --- no reduction -------------------------------------------------------------------------------------------


def test_normal_nodes_have_no_factors() -> None:
    assert FactorSimulation(fleet(A, B)).step({A: normal(), B: normal()}) == {}
    assert FactorSimulation(fleet(A, B)).step({}) == {}


@pytest.mark.parametrize("name", FACTORS)
def test_problem_of_most_nodes_reduces_no_share(name: str) -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    simulation.step({A: abnormal(name), B: abnormal(name), C: normal()})
    assert [simulation.share(a) for a in (A, B, C)] == [1, 1, 1]
    if name != "cpu":
        assert simulation.factors[A][name].level == 2
        assert "most nodes" in simulation.factors[A][name].reason


def test_health_and_memory_together_reduce_at_most_half_of_the_capacity() -> None:
    simulation = FactorSimulation(fleet(A, B, C, D))
    short_of_memory = dict.fromkeys((B, C), abnormal("memory"))
    factors = simulation.step({A: abnormal("health"), **short_of_memory, D: normal()})
    assert factors[A]["health"].target == MIN_SHARE
    assert [factors[address]["memory"].target for address in short_of_memory] == [1.0, 1.0]


@pytest.mark.parametrize("name", FACTORS)
def test_majority_is_measured_by_capacity(name: str) -> None:
    simulation = FactorSimulation({A: serving_node(A, 300), B: serving_node(B), C: serving_node(C)})
    simulation.step({A: abnormal(name), B: normal(), C: normal()})
    assert simulation.share(A) == 1
    simulation.step({A: normal(), B: abnormal(name), C: normal()})
    assert simulation.share(B) < 1


def test_one_idle_node_does_not_reduce_the_others() -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    simulation.step({A: abnormal("cpu"), B: abnormal("cpu"), C: normal(cpu=MetricValue(0.01, NOW))})
    assert simulation.factors == {}


def test_small_cpu_differences_are_ignored() -> None:
    simulation = FactorSimulation(fleet(A, B))
    assert (
        simulation.step({A: normal(cpu=MetricValue(0.45, NOW)), B: normal(cpu=MetricValue(0.3, NOW))}) == {}
    )


@pytest.mark.parametrize("used", [0.0, -0.2, -5.0])
def test_idle_and_invalid_cpu_values_reduce_nothing(used: float) -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    simulation.factors = {A: {"cpu": Factor(0.5, 0.5, 1, "")}}
    idle = normal(cpu=MetricValue(0.0, NOW))
    invalid = normal(cpu=MetricValue(used, NOW))
    assert simulation.step({A: idle, B: invalid, C: invalid})[A]["cpu"].target == 1


def test_common_level_one_does_not_hide_level_two() -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    raised = normal(memory=MetricValue(0.65, NOW))
    simulation.step({A: abnormal("memory"), B: raised, C: raised})
    assert simulation.share(A) < 1
    assert (simulation.share(B), simulation.share(C)) == (1, 1)


def test_nodes_are_compared_within_their_group() -> None:
    nodes = {a: serving_node(a, group="g" if a in (A, B) else "") for a in (A, B, C, D, E)}
    simulation = FactorSimulation(nodes)
    simulation.step(
        {A: abnormal("health"), B: abnormal("health"), C: abnormal("health"), D: normal(), E: normal()}
    )
    assert [simulation.share(a) < 1 for a in (A, B, C)] == [False, False, True]


def test_backup_nodes_are_not_compared() -> None:
    simulation = FactorSimulation({A: serving_node(A), B: serving_node(B), C: serving_node(C, backup=True)})
    simulation.step({A: abnormal("health"), B: abnormal("health"), C: abnormal("health")})
    assert [simulation.share(a) for a in (A, B, C)] == [1, 1, 1]
    simulation.step({A: abnormal("health"), B: normal(), C: abnormal("health")})
    assert [simulation.share(a) < 1 for a in (A, B, C)] == [True, False, False]


def test_cpu_is_not_compared_during_slow_start() -> None:
    nodes = fleet(A, B, C) | {D: serving_node(D, active_since=NOW - 10)}
    simulation = FactorSimulation(nodes, Policy(slow_start=30))
    busy = normal(cpu=MetricValue(0.6, NOW))
    new = normal(cpu=MetricValue(0.0, NOW))
    assert simulation.step({A: busy, B: busy, C: busy, D: new}) == {}
    assert simulation.step({A: normal(), B: normal(), C: normal(), D: abnormal("cpu")}) == {}
    for _ in range(20):
        simulation.step({A: normal(), B: normal(), C: normal(), D: abnormal("cpu")})
    assert simulation.share(D) < 1


def test_only_nodes_in_service_have_factors() -> None:
    simulation = FactorSimulation(fleet(A, B) | {C: serving_node(C, eds_health=EdsHealth.DRAINING)})
    assert simulation.step({A: normal(), B: normal(), C: abnormal("health")}) == {}


def test_connection_policy_has_no_factors() -> None:
    simulation = FactorSimulation(fleet(A, B), Policy(balance_policy=BalancePolicy.CONNECTION))
    assert simulation.step({A: abnormal("health"), B: normal()}) == {}


def test_location_policy_has_the_same_factors() -> None:
    simulation = FactorSimulation(fleet(A, B), Policy(balance_policy=BalancePolicy.LOCATION))
    assert simulation.step({A: abnormal("health"), B: normal()}).keys() == {A}


# --- unknown metrics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORS)
def test_share_recovers_slowly_when_metric_is_lost(name: str) -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    others = {B: normal(), C: normal()}
    for _ in range(20):
        simulation.step(others | {A: abnormal(name)})
    remaining = simulation.share(A)
    simulation.step(others)
    assert simulation.share(A) == pytest.approx(remaining + 1 / 60)
    assert simulation.factors[A][name] == Factor(simulation.share(A), 1.0, 0, "not known")
    simulation.step({})  # no node has metrics any more
    assert simulation.share(A) == pytest.approx(remaining + 2 / 60)
    for _ in range(60):
        simulation.step({})
    assert simulation.factors == {}


@pytest.mark.parametrize(("name", "max_age"), [("health", 60), ("memory", 60), ("cpu", 120)])
def test_metrics_expire_after_documented_age(name: str, max_age: int) -> None:
    simulation = FactorSimulation(fleet(A, B, C))
    for age, is_known in ((max_age - 1, True), (max_age + 1, False)):
        simulation.factors = {}
        simulation.step({A: abnormal(name, NOW - age), B: normal(), C: normal()})
        assert (simulation.share(A) < 1) is is_known


def test_nodes_without_metrics_are_not_compared() -> None:
    simulation = FactorSimulation(fleet(A, B, C, D, E))
    simulation.step({A: abnormal("cpu"), B: normal(), C: normal()})
    assert simulation.factors[A]["cpu"].reason == "its CPU is at 95%, where 52% is normal in its group"
    simulation = FactorSimulation(fleet(A, B, C, D, E))
    simulation.step({A: abnormal("health"), B: abnormal("health"), C: normal()})
    assert simulation.share(A) == 1  # most nodes with metrics have the problem


# --- properties ---------------------------------------------------------------------------------------------

_readings = st.none() | st.builds(MetricValue, st.floats(0, 1.5), st.floats(NOW - 150, NOW))
_vitals = st.builds(
    NodeMetrics,
    cpu=_readings,
    memory=_readings,
    memory_growth=st.floats(-0.05, 0.05),
    pd_failures=_readings,
    tikv_failures=_readings,
)
_factor = st.builds(Factor, st.floats(MIN_SHARE, 1), st.floats(MIN_SHARE, 1), st.integers(0, 2))
_nodes = st.builds(
    lambda weight, group, backup, factors: serving_node(
        "", weight, group=group, backup=backup, factors={n: f for n, f in factors.items() if f.share < 1}
    ),
    st.sampled_from((1, 50, 100, 400)),
    st.sampled_from(("", "g")),
    st.sampled_from((False, False, True)),
    st.dictionaries(st.sampled_from(FACTORS), _factor),
)
_fleets = st.lists(st.tuples(_nodes, st.none() | _vitals), min_size=1, max_size=12)
Members = Sequence[tuple[NodePlan, NodeMetrics | None]]


def planned(members: Members) -> tuple[dict[str, NodePlan], Facts]:
    nodes = {f"n{i}": replace(p, node=replace(p.node, address=f"n{i}")) for i, (p, _) in enumerate(members)}
    return nodes, Facts(node_metrics={f"n{i}": v for i, (_, v) in enumerate(members) if v is not None})


@given(_fleets, st.floats(0, 20))
def test_shares_respect_bounds_and_rates(members: Members, elapsed: float) -> None:
    nodes, facts = planned(members)
    result = advance_factors(
        nodes, Inputs(Plan(nodes, weights_computed_at=NOW - elapsed), facts, Policy(), NOW)
    )
    receiving = [address for members in serving_by_group(nodes).values() for address in members]
    for address, node in ((a, nodes[a]) for a in receiving):
        for name in FACTORS:
            current = node.factors[name].share if name in node.factors else 1.0
            reached = result.get(address, {}).get(name, Factor(1.0, 1.0))
            assert MIN_SHARE <= reached.share <= 1
            assert MIN_SHARE <= reached.target <= 1
            speed = 1 / 10 if name == "memory" and reached.target < current else 1 / 60
            assert abs(reached.share - current) <= speed * min(elapsed, 10) + 1e-9


@given(_fleets)
def test_factors_reduce_at_most_three_quarters_of_capacity(members: Members) -> None:
    nodes, facts = planned(members)
    result = advance_factors(nodes, Inputs(Plan(nodes, weights_computed_at=NOW), facts, Policy(), NOW))
    for receiving in serving_by_group(nodes).values():
        total = sum(nodes[a].node.weight for a in receiving)
        for names, limit in ((FACTORS[:2], total / 2), (FACTORS, total * 3 / 4)):
            reduced = [a for a in receiving if any(result.get(a, {}).get(n, _FREE).target < 1 for n in names)]
            assert sum(nodes[a].node.weight for a in reduced) <= limit


_FREE = Factor(1.0, 1.0)


@given(_fleets, st.randoms())
def test_factors_are_independent_of_node_order(members: Members, rng: random.Random) -> None:
    nodes, facts = planned(members)
    order = list(nodes)
    rng.shuffle(order)
    shuffled = {a: nodes[a] for a in order}
    one = advance_factors(nodes, Inputs(Plan(nodes, weights_computed_at=NOW - 1), facts, Policy(), NOW))
    other = advance_factors(
        shuffled, Inputs(Plan(shuffled, weights_computed_at=NOW - 1), facts, Policy(), NOW)
    )
    assert one.keys() == other.keys()
    for address, factors in one.items():
        assert {n: f.share for n, f in factors.items()} == pytest.approx(
            {n: f.share for n, f in other[address].items()}
        )


@given(_fleets)
def test_factors_are_unchanged_without_elapsed_time(members: Members) -> None:
    nodes, facts = planned(members)
    once = advance_factors(nodes, Inputs(Plan(nodes, weights_computed_at=NOW - 1), facts, Policy(), NOW))
    current = {a: replace(p, factors=once.get(a, EMPTY_MAP)) for a, p in nodes.items()}
    twice = advance_factors(current, Inputs(Plan(current, weights_computed_at=NOW), facts, Policy(), NOW))
    # Factors of 1 are not compared: after other shares fell, a node may count as busy with a factor of 1.
    assert reducing_shares(once) == reducing_shares(twice)


def reducing_shares(result: Mapping[str, Mapping[str, Factor]]) -> dict[tuple[str, str], float]:
    """Return the shares of factors below 1, by address and name."""
    return {(a, name): f.share for a, by_name in result.items() for name, f in by_name.items() if f.share < 1}


@settings(max_examples=25)
@given(_fleets)
def test_shares_converge_for_constant_metrics(members: Members) -> None:
    """Check that no share rises after it has fallen. So each share, which is bounded, converges.

    The test does not wait for the end: near its target, a share may change in tiny steps.
    """
    nodes, facts = planned(members)
    result: Mapping[str, Mapping[str, Factor]] = {a: p.factors for a, p in nodes.items()}
    fallen: set[tuple[str, str]] = set()
    for step in range(200):
        before = result
        current = {a: replace(p, factors=result.get(a, EMPTY_MAP)) for a, p in nodes.items()}
        result = advance_factors(
            current, Inputs(Plan(current, weights_computed_at=NOW - 10), facts, Policy(), NOW)
        )
        if step < 3:
            continue  # levels still depend on the initial levels
        for address, name in itertools.product(nodes, FACTORS):
            past, now = (factors.get(address, {}).get(name, _FREE).share for factors in (before, result))
            assert now <= past or (address, name) not in fallen
            if now < past:
                fallen.add((address, name))


# --- closed loop with simulated nodes ----------------------------------------------------------------------


def simulate_loop(costs: Sequence[float], total: float, follow: float, noise: float) -> list[list[float]]:
    """Return the shares of each second. Loads follow shares with the time constant `follow` in seconds.

    Metrics are means of 30 s, and 15 s old.
    """
    rng = random.Random(1)
    names = [f"n{i}" for i in range(len(costs))]
    simulation = FactorSimulation(fleet(*names))
    loads = [1 / len(costs)] * len(costs)
    used: list[deque[float]] = [deque(maxlen=45) for _ in costs]
    shares_by_second, metrics = [], {}
    for second in range(1500):
        current = [simulation.share(name) for name in names]
        for i, cost in enumerate(costs):
            loads[i] += (current[i] / sum(current) - loads[i]) / follow
            used[i].append(min(1.0, max(0.0, 0.05 + cost * total * loads[i] + rng.gauss(0, noise))))
        if second % 5 == 0:
            means = [sum(list(values)[:30]) / min(30, len(values)) for values in used]
            metrics = {n: normal(cpu=MetricValue(mean, NOW)) for n, mean in zip(names, means, strict=True)}
        simulation.step(metrics)
        shares_by_second.append([simulation.share(name) for name in names])
    return shares_by_second


@pytest.mark.parametrize("follow", [5.0, 30.0])
def test_share_of_a_slow_node_falls_and_stays_stable(follow: float) -> None:
    shares_by_second = simulate_loop([0.9] * 4 + [1.8], 2.2, follow, 0.02)
    assert all(share == 1 for row in shares_by_second for share in row[:4])
    slow = [row[4] for row in shares_by_second]
    assert 0.45 < min(slow) <= max(slow[300:]) < 0.75
    assert max(slow[700:]) - min(slow[700:]) < 0.02


def test_noise_hardly_changes_shares() -> None:
    shares_by_second = simulate_loop([0.9] * 5, 3.0, 5.0, 0.3)
    assert min(min(row) for row in shares_by_second[60:]) > 0.9


# --- cost ---------------------------------------------------------------------------------------------------


def test_five_thousand_nodes_take_under_50_ms() -> None:
    rng = random.Random(1)
    nodes = {f"10.0.0.{i}:4000": serving_node(f"10.0.0.{i}:4000") for i in range(5000)}
    node_metrics = {a: normal(cpu=MetricValue(rng.uniform(0.3, 0.6), NOW)) for a in nodes}
    facts, plan = Facts(node_metrics=node_metrics), Plan(nodes, weights_computed_at=NOW)

    def seconds_taken() -> float:
        start = time.thread_time()
        advance_factors(nodes, Inputs(plan, facts, Policy(), NOW))
        return time.thread_time() - start

    # It takes 6 ms on an idle machine.
    assert min(seconds_taken() for _ in range(5)) < 0.05
    assert resource_factors.NAMES == FACTORS
