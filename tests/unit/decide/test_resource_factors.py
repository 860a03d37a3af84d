"""Health, memory and CPU bear on shares: who gives sessions away, how fast, and when that is no reason."""

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
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import EMPTY_MAP, Node, Source, State
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

NOW = 10_000.0
A, B, C, D, E = "abcde"
FACTORS = ("health", "memory", "cpu")


def serving(address: str, weight: int = 100, **more: object) -> NodePlan:
    plan = NodePlan(Node(address, Source.STATIC, weight=weight), State.ACTIVE, "", 0.0, EdsHealth.HEALTHY)
    return replace(plan, **more)  # type: ignore[arg-type]


def well(at: float = NOW, **other: MetricValue | float | None) -> NodeMetrics:
    low, none = MetricValue(0.3, at), MetricValue(0, at)
    calm = NodeMetrics(cpu=low, memory=low, pd_failures=none, tikv_failures=none)
    return replace(calm, **other)  # type: ignore[arg-type]


def ill(name: str, at: float = NOW) -> NodeMetrics:
    """Vitals with which a factor takes something."""
    return {
        "health": well(at, pd_failures=MetricValue(0.6, at)),
        "memory": well(at, memory=MetricValue(0.8, at)),
        "cpu": well(at, cpu=MetricValue(0.95, at)),
    }[name]


def fleet(*names: str) -> dict[str, NodePlan]:
    return {name: serving(name) for name in names}


class Course:
    """Steps of one second over the same nodes, by the vitals of each moment."""

    def __init__(self, nodes: Mapping[str, NodePlan], policy: Policy | None = None) -> None:
        self.now, self.nodes, self.policy = NOW, nodes, policy or Policy()
        self.found: dict[str, Mapping[str, Factor]] = {}

    def plan(self) -> Plan:
        """The plan as it is now."""
        nodes = {a: replace(p, factors=self.found.get(a, EMPTY_MAP)) for a, p in self.nodes.items()}
        return Plan(nodes, weights_computed_at=self.now)

    def go(
        self, vitals: Mapping[str, NodeMetrics], seconds: float = 1.0
    ) -> Mapping[str, Mapping[str, Factor]]:
        """One step; the readings are as old as they say at its end."""
        previous = self.plan()
        self.now += seconds
        aged = {a: _moved(known, self.now - NOW) for a, known in vitals.items()}
        self.found = advance_factors(self.nodes, previous, Facts(node_metrics=aged), self.policy, self.now)
        return self.found

    def share(self, address: str) -> float:
        """What a node has left of its share."""
        return combined_share(self.found.get(address, EMPTY_MAP))


def _moved(known: NodeMetrics, seconds: float) -> NodeMetrics:
    def later(reading: MetricValue | None) -> MetricValue | None:
        return None if reading is None else MetricValue(reading.value, reading.at + seconds)

    return replace(
        known,
        cpu=later(known.cpu),
        memory=later(known.memory),
        pd_failures=later(known.pd_failures),
        tikv_failures=later(known.tikv_failures),
    )


# --- speeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["health", "memory"])
def test_sessions_leave_in_a_minute_and_come_back_in_one(name: str) -> None:
    course = Course(fleet(A, B, C))
    calm = {A: well(), B: well(), C: well()}
    course.go(calm | {A: ill(name)})
    assert course.found.keys() == {A}
    assert course.found[A][name].target == MIN_SHARE
    assert course.share(A) == pytest.approx(1 - 1 / 60)
    for _ in range(58):
        course.go(calm | {A: ill(name)})
    assert course.share(A) == pytest.approx(MIN_SHARE)
    for _ in range(30):
        course.go(calm)
    assert course.share(A) == pytest.approx(MIN_SHARE + 0.5)
    assert (course.found[A][name].level, course.found[A][name].reason) == (0, "")
    for _ in range(30):
        course.go(calm)
    assert course.found == {}


def test_who_will_soon_have_no_memory_is_left_in_ten_seconds() -> None:
    course = Course(fleet(A, B))
    dying = replace(ill("memory"), memory_growth=0.01)
    course.go({A: dying, B: well()})
    assert course.share(A) == pytest.approx(0.9)
    for _ in range(9):
        course.go({A: dying, B: well()})
    assert course.share(A) == pytest.approx(MIN_SHARE)


def test_memory_that_is_short_halves_a_share() -> None:
    course = Course(fleet(A, B))
    for _ in range(40):
        course.go({A: well(memory=MetricValue(0.65, NOW)), B: well()})
    assert course.share(A) == pytest.approx(0.5)
    assert course.found[A]["memory"].level == 1


def test_a_busy_node_gives_away_what_makes_it_busier_than_the_others() -> None:
    course = Course(fleet(A, B, C, D))
    course.go({A: well(cpu=MetricValue(0.9, NOW)), B: well(), C: well(), D: well()})
    factor = course.found[A]["cpu"]
    mean = (0.9 + 3 * 0.3) / 4
    assert course.found.keys() == {A}
    assert factor.target == pytest.approx(mean / 0.9)
    assert factor.share == pytest.approx(1 - (1 - mean / 0.9) / 60)
    assert factor.reason == "its CPU is at 90%, where 45% is usual"


def test_a_node_that_stays_busy_with_fewer_sessions_is_left_and_comes_back() -> None:
    course = Course(fleet(A, B, C, D))
    calm = {B: well(), C: well(), D: well()}
    past = 1.0
    for _ in range(480):
        course.go(calm | {A: ill("cpu")})
        assert past - 0.02 <= course.share(A) <= past
        past = course.share(A)
    assert past == pytest.approx(MIN_SHARE)
    for _ in range(120):
        course.go(calm | {A: well(cpu=MetricValue(0.02, NOW))})
    assert course.found == {}


@pytest.mark.parametrize(("pause", "counted"), [(0.0, 0.0), (-5.0, 0.0), (7.0, 7.0), (3600.0, 10.0)])
def test_a_pause_or_a_clock_that_was_set_makes_no_leap(pause: float, counted: float) -> None:
    course = Course(fleet(A, B))
    course.go({A: ill("health"), B: well()}, pause)
    assert course.share(A) == pytest.approx(1 - counted / 60)


# --- what is no reason --------------------------------------------------------------------------------------


def test_who_is_well_has_no_factors() -> None:
    assert Course(fleet(A, B)).go({A: well(), B: well()}) == {}
    assert Course(fleet(A, B)).go({}) == {}


@pytest.mark.parametrize("name", FACTORS)
def test_what_most_nodes_have_is_no_reason_to_avoid_them(name: str) -> None:
    course = Course(fleet(A, B, C))
    course.go({A: ill(name), B: ill(name), C: well()})
    assert [course.share(a) for a in (A, B, C)] == [1, 1, 1]
    if name != "cpu":
        assert course.found[A][name].level == 2
        assert "most nodes" in course.found[A][name].reason


@pytest.mark.parametrize("name", FACTORS)
def test_it_is_capacity_that_makes_a_majority(name: str) -> None:
    course = Course({A: serving(A, 300), B: serving(B), C: serving(C)})
    course.go({A: ill(name), B: well(), C: well()})
    assert course.share(A) == 1
    course.go({A: well(), B: ill(name), C: well()})
    assert course.share(B) < 1


def test_one_node_that_idles_does_not_make_all_others_busy() -> None:
    course = Course(fleet(A, B, C))
    course.go({A: ill("cpu"), B: ill("cpu"), C: well(cpu=MetricValue(0.01, NOW))})
    assert course.found == {}


def test_small_differences_of_cpu_are_borne() -> None:
    course = Course(fleet(A, B))
    assert course.go({A: well(cpu=MetricValue(0.45, NOW)), B: well(cpu=MetricValue(0.3, NOW))}) == {}


@pytest.mark.parametrize("used", [0.0, -0.2, -5.0])
def test_idle_nodes_and_readings_that_cannot_be_take_nothing(used: float) -> None:
    course = Course(fleet(A, B, C))
    course.found = {A: {"cpu": Factor(0.5, 0.5, 1, "")}}
    idle = well(cpu=MetricValue(0.0, NOW))
    strange = well(cpu=MetricValue(used, NOW))
    assert course.go({A: idle, B: strange, C: strange})[A]["cpu"].target == 1


def test_level_one_of_most_does_not_hide_level_two_of_one() -> None:
    course = Course(fleet(A, B, C))
    raised = well(memory=MetricValue(0.65, NOW))
    course.go({A: ill("memory"), B: raised, C: raised})
    assert course.share(A) < 1
    assert (course.share(B), course.share(C)) == (1, 1)


def test_groups_are_compared_each_for_itself() -> None:
    nodes = {a: serving(a, group="g" if a in (A, B) else "") for a in (A, B, C, D, E)}
    course = Course(nodes)
    course.go({A: ill("health"), B: ill("health"), C: ill("health"), D: well(), E: well()})
    assert [course.share(a) < 1 for a in (A, B, C)] == [False, False, True]


def test_nodes_that_only_stand_in_are_not_compared() -> None:
    course = Course({A: serving(A), B: serving(B), C: serving(C, backup=True)})
    course.go({A: ill("health"), B: ill("health"), C: ill("health")})
    assert [course.share(a) for a in (A, B, C)] == [1, 1, 1]
    course.go({A: ill("health"), B: well(), C: ill("health")})
    assert [course.share(a) < 1 for a in (A, B, C)] == [True, False, False]


def test_the_cpu_of_a_node_in_its_slow_start_is_not_compared() -> None:
    nodes = fleet(A, B, C) | {D: serving(D, active_since=NOW - 10)}
    course = Course(nodes, Policy(slow_start=30))
    busy = well(cpu=MetricValue(0.6, NOW))
    new = well(cpu=MetricValue(0.0, NOW))
    assert course.go({A: busy, B: busy, C: busy, D: new}) == {}
    assert course.go({A: well(), B: well(), C: well(), D: ill("cpu")}) == {}
    for _ in range(20):
        course.go({A: well(), B: well(), C: well(), D: ill("cpu")})
    assert course.share(D) < 1


def test_only_nodes_in_service_have_factors() -> None:
    course = Course(fleet(A, B) | {C: serving(C, eds_health=EdsHealth.DRAINING)})
    assert course.go({A: well(), B: well(), C: ill("health")}) == {}


def test_balancing_by_connections_alone_knows_no_factors() -> None:
    course = Course(fleet(A, B), Policy(balance_policy=BalancePolicy.CONNECTION))
    assert course.go({A: ill("health"), B: well()}) == {}


def test_location_policy_has_the_same_factors() -> None:
    course = Course(fleet(A, B), Policy(balance_policy=BalancePolicy.LOCATION))
    assert course.go({A: ill("health"), B: well()}).keys() == {A}


# --- what is not known --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORS)
def test_what_is_not_known_any_more_gives_its_share_back_slowly(name: str) -> None:
    course = Course(fleet(A, B, C))
    calm = {B: well(), C: well()}
    for _ in range(20):
        course.go(calm | {A: ill(name)})
    left = course.share(A)
    course.go(calm)
    assert course.share(A) == pytest.approx(left + 1 / 60)
    assert course.found[A][name] == Factor(course.share(A), 1.0, 0, "not known")
    course.go({})  # as when nothing can be read of any
    assert course.share(A) == pytest.approx(left + 2 / 60)
    for _ in range(60):
        course.go({})
    assert course.found == {}


@pytest.mark.parametrize(("name", "lasts"), [("health", 60), ("memory", 60), ("cpu", 120)])
def test_a_reading_counts_as_long_as_is_documented(name: str, lasts: int) -> None:
    course = Course(fleet(A, B, C))
    for age, is_known in ((lasts - 1, True), (lasts + 1, False)):
        course.found = {}
        course.go({A: ill(name, NOW - age), B: well(), C: well()})
        assert (course.share(A) < 1) is is_known


def test_who_is_not_known_is_neither_well_nor_ill() -> None:
    course = Course(fleet(A, B, C, D, E))
    course.go({A: ill("cpu"), B: well(), C: well()})
    assert course.found[A]["cpu"].reason == "its CPU is at 95%, where 52% is usual"
    course = Course(fleet(A, B, C, D, E))
    course.go({A: ill("health"), B: ill("health"), C: well()})
    assert course.share(A) == 1  # most of those that are known


# --- for all fleets -----------------------------------------------------------------------------------------

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
    lambda weight, group, backup, found: serving(
        "", weight, group=group, backup=backup, factors={n: f for n, f in found.items() if f.share < 1}
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
def test_shares_stay_within_their_bounds_and_go_no_faster_than_they_may(
    members: Members, elapsed: float
) -> None:
    nodes, facts = planned(members)
    found = advance_factors(nodes, Plan(nodes, weights_computed_at=NOW - elapsed), facts, Policy(), NOW)
    taking = [address for members in serving_by_group(nodes).values() for address in members]
    for address, node in ((a, nodes[a]) for a in taking):
        for name in FACTORS:
            held = node.factors[name].share if name in node.factors else 1.0
            reached = found.get(address, {}).get(name, Factor(1.0, 1.0))
            assert MIN_SHARE <= reached.share <= 1
            assert MIN_SHARE <= reached.target <= 1
            speed = 1 / 10 if name == "memory" and reached.target < held else 1 / 60
            assert abs(reached.share - held) <= speed * min(elapsed, 10) + 1e-9


@given(_fleets)
def test_of_the_nodes_that_share_sessions_a_quarter_at_least_keeps_its_share(members: Members) -> None:
    nodes, facts = planned(members)
    found = advance_factors(nodes, Plan(nodes, weights_computed_at=NOW), facts, Policy(), NOW)
    for taking in serving_by_group(nodes).values():
        every = sum(nodes[a].node.weight for a in taking)
        for names, most in ((FACTORS[:2], every / 2), (FACTORS, every * 3 / 4)):
            pushed = [a for a in taking if any(found.get(a, {}).get(n, _FREE).target < 1 for n in names)]
            assert sum(nodes[a].node.weight for a in pushed) <= most


_FREE = Factor(1.0, 1.0)


@given(_fleets, st.randoms())
def test_the_order_of_the_nodes_does_not_matter(members: Members, chance: random.Random) -> None:
    nodes, facts = planned(members)
    order = list(nodes)
    chance.shuffle(order)
    shuffled = {a: nodes[a] for a in order}
    one = advance_factors(nodes, Plan(nodes, weights_computed_at=NOW - 1), facts, Policy(), NOW)
    other = advance_factors(shuffled, Plan(shuffled, weights_computed_at=NOW - 1), facts, Policy(), NOW)
    assert one.keys() == other.keys()
    for address, each in one.items():
        assert {n: f.share for n, f in each.items()} == pytest.approx(
            {n: f.share for n, f in other[address].items()}
        )


@given(_fleets)
def test_what_was_worked_out_stands_while_no_time_goes_by(members: Members) -> None:
    nodes, facts = planned(members)
    once = advance_factors(nodes, Plan(nodes, weights_computed_at=NOW - 1), facts, Policy(), NOW)
    held = {a: replace(p, factors=once.get(a, EMPTY_MAP)) for a, p in nodes.items()}
    twice = advance_factors(held, Plan(held, weights_computed_at=NOW), facts, Policy(), NOW)
    # One of 1 takes nothing: a node may only now be too busy, beside others that give already.
    assert taken(once) == taken(twice)


def taken(found: Mapping[str, Mapping[str, Factor]]) -> dict[tuple[str, str], float]:
    """The shares of factors that take something, by address and name."""
    return {(a, name): f.share for a, each in found.items() for name, f in each.items() if f.share < 1}


@settings(max_examples=25)
@given(_fleets)
def test_shares_come_to_rest_when_nothing_changes(members: Members) -> None:
    """None rises after it has fallen: with bounds and at most one turning point, each of them converges.

    How long that takes has no bound: a share near its target may move by tiny steps.
    """
    nodes, facts = planned(members)
    found: Mapping[str, Mapping[str, Factor]] = {a: p.factors for a, p in nodes.items()}
    fallen: set[tuple[str, str]] = set()
    for step in range(200):
        before = found
        held = {a: replace(p, factors=found.get(a, EMPTY_MAP)) for a, p in nodes.items()}
        found = advance_factors(held, Plan(held, weights_computed_at=NOW - 10), facts, Policy(), NOW)
        if step < 3:
            continue  # levels still follow from those that the nodes had at first
        for address, name in itertools.product(nodes, FACTORS):
            was, now = (each.get(address, {}).get(name, _FREE).share for each in (before, found))
            assert now <= was or (address, name) not in fallen
            if now < was:
                fallen.add((address, name))


# --- in a loop with nodes that answer -----------------------------------------------------------------------


def looped(costs: Sequence[float], total: float, follow: float, noise: float) -> list[list[float]]:
    """Shares by second. Sessions follow shares in `follow` seconds; a reading is of 30 s, and 15 s old."""
    chance = random.Random(1)
    names = [f"n{i}" for i in range(len(costs))]
    course = Course(fleet(*names))
    loads = [1 / len(costs)] * len(costs)
    used: list[deque[float]] = [deque(maxlen=45) for _ in costs]
    shown, known = [], {}
    for second in range(1500):
        held = [course.share(name) for name in names]
        for i, cost in enumerate(costs):
            loads[i] += (held[i] / sum(held) - loads[i]) / follow
            used[i].append(min(1.0, max(0.0, 0.05 + cost * total * loads[i] + chance.gauss(0, noise))))
        if second % 5 == 0:
            means = [sum(list(each)[:30]) / min(30, len(each)) for each in used]
            known = {n: well(cpu=MetricValue(mean, NOW)) for n, mean in zip(names, means, strict=True)}
        course.go(known)
        shown.append([course.share(name) for name in names])
    return shown


@pytest.mark.parametrize("follow", [5.0, 30.0])
def test_a_slow_node_gets_less_and_then_neither_more_nor_less(follow: float) -> None:
    shown = looped([0.9] * 4 + [1.8], 2.2, follow, 0.02)
    assert all(share == 1 for row in shown for share in row[:4])
    slow = [row[4] for row in shown]
    assert 0.45 < min(slow) <= max(slow[300:]) < 0.75
    assert max(slow[700:]) - min(slow[700:]) < 0.02


def test_noise_moves_next_to_nothing() -> None:
    shown = looped([0.9] * 5, 3.0, 5.0, 0.3)
    assert min(min(row) for row in shown[60:]) > 0.9


# --- cost ---------------------------------------------------------------------------------------------------


def test_five_thousand_nodes_take_no_time() -> None:
    chance = random.Random(1)
    nodes = {f"10.0.0.{i}:4000": serving(f"10.0.0.{i}:4000") for i in range(5000)}
    vitals = {a: well(cpu=MetricValue(chance.uniform(0.3, 0.6), NOW)) for a in nodes}
    facts, plan = Facts(node_metrics=vitals), Plan(nodes, weights_computed_at=NOW)

    def took() -> float:
        start = time.thread_time()
        advance_factors(nodes, plan, facts, Policy(), NOW)
        return time.thread_time() - start

    # 6 ms on a machine that has nothing else to do.
    assert min(took() for _ in range(5)) < 0.05
    assert resource_factors.NAMES == FACTORS
