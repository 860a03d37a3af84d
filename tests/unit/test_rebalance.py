"""Sessions asked to move to nodes that have joined: how many, from where, and when none at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.rebalance import ROUND, rebalance
from controlplane.model import (
    Advice,
    EnvoyLoad,
    Facts,
    Node,
    NodePlan,
    Plan,
    Policy,
    Rebalance,
    Source,
    State,
)
from controlplane.traffic import Census

NOW = 2_000_000.0
LONG_AGO = NOW - 10_000.0
POLICY = Policy(slow_start=0, fleet_return=15.0)
A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
X, Y = "00000000000000aa", "00000000000000bb"


def node(address: str, since: float = LONG_AGO, weight: int = 100, state: State = State.ACTIVE) -> NodePlan:
    """A node that has been in service since then."""
    active = since if state is State.ACTIVE else None
    return NodePlan(
        Node(address, Source.PD, weight=weight), state, "", since, Advice.HEALTHY, weight, address, active
    )


def nodes(*planned: NodePlan) -> dict[str, NodePlan]:
    return {each.node.address: each for each in planned}


@dataclass(frozen=True)
class Fleet:
    """What Envoys tell of their sessions: by Envoy, then by address."""

    sessions: Mapping[str, Mapping[str, int]]
    at: float = NOW
    began: float = NOW - 2
    instances: Mapping[str, str] = field(default_factory=lambda: {"x": X, "y": Y})
    covered: frozenset[str] = frozenset((A, B, C))

    def facts(self) -> Facts:
        censuses = {
            envoy: Census(
                self.at,
                self.began,
                {a: count for a, count in there.items() if count},
                self.covered,
                instance=self.instances.get(envoy, ""),
            )
            for envoy, there in self.sessions.items()
        }
        counted: dict[str, int] = {}
        for census in censuses.values():
            for address, count in census.sessions.items():
                counted[address] = counted.get(address, 0) + count
        return Facts(censuses=censuses, counted=counted, envoys=dict.fromkeys(censuses, self.at))


JOINED = nodes(node(A), node(B), node(C, NOW))
FLEET = Fleet({"x": {A: 30, B: 30}, "y": {A: 15, B: 15}})


def decided(
    facts: Facts,
    planned: Mapping[str, NodePlan] = JOINED,
    before: Rebalance | None = None,
    policy: Policy = POLICY,
    now: float = NOW,
    floor: str = "",
) -> Rebalance:
    past = Plan(planned, "", before or Rebalance())
    return rebalance(planned, floor, past, facts, policy, now)


def test_the_others_give_their_surplus_to_a_node_that_joins() -> None:
    found = decided(FLEET.facts())
    assert found.moves == {A: {X: 10, Y: 5}, B: {X: 10, Y: 5}}
    assert (found.since, found.round, found.until) == (NOW, int(NOW), NOW + ROUND)
    assert found.reason == f"{C} has 0 of the 30 sessions that are its share"
    assert found.wants == (C,)


def test_sessions_are_for_those_nodes_alone_that_joined_and_lack_some() -> None:
    fed = Fleet({"x": {A: 60, B: 0, C: 0}}).facts()
    assert decided(fed).wants == (C,)  # B has been there for long
    assert decided(fed, nodes(node(A), node(B, NOW), node(C, NOW))).wants == (B, C)
    full = Fleet({"x": {A: 60, B: 30, C: 0}}).facts()
    assert decided(full, nodes(node(A), node(B, NOW), node(C, NOW))).wants == (C,)


def test_shares_go_by_weight_and_by_slow_start() -> None:
    heavy = nodes(node(A), node(B), node(C, NOW, weight=300))
    assert sum(sum(m.values()) for m in decided(FLEET.facts(), heavy).moves.values()) == 54
    slow = replace(POLICY, slow_start=30.0)
    for active_for, share in ((0.0, 4), (15.0, 18), (29.9, 28), (30.0, 30)):
        joined = nodes(node(A), node(B), node(C, NOW - active_for))
        found = decided(FLEET.facts(), joined, policy=slow)
        assert sum(sum(m.values()) for m in found.moves.values()) == share


def test_only_what_is_above_the_share_is_given() -> None:
    uneven = Fleet({"x": {A: 100, B: 20}})
    assert decided(uneven.facts()).moves == {A: {X: 40}}


def test_a_round_has_a_limit_for_the_whole_fleet() -> None:
    many = Fleet({"x": {A: 3000, B: 3000}, "y": {A: 1500, B: 1500}})
    found = decided(many.facts(), policy=replace(POLICY, rebalance_per_second=20.0))
    assert found.moves == {A: {X: 33, Y: 17}, B: {X: 33, Y: 17}}


def test_a_node_counts_as_joined_for_a_minute_after_its_slow_start() -> None:
    slow = replace(POLICY, slow_start=30.0)
    late = nodes(node(A), node(B), node(C, NOW - 89.9))
    assert decided(FLEET.facts(), late, policy=slow).moves
    assert decided(FLEET.facts(), nodes(node(A), node(B), node(C, NOW - 90.0)), policy=slow) == Rebalance()
    out = nodes(node(A), node(B), node(C, NOW, state=State.DRAINING))
    assert decided(FLEET.facts(), out) == Rebalance()


def test_a_little_is_no_reason_to_begin_but_one_to_go_on() -> None:
    little = Fleet({"x": {A: 104, B: 104, C: 92}}).facts()  # lacks 8 of 100
    assert decided(little) == Rebalance()
    going_on = Rebalance(NOW - 20, "", 7, NOW - 15)
    assert decided(little, before=going_on).moves == {A: {X: 4}, B: {X: 4}}
    done = Fleet({"x": {A: 101, B: 100, C: 99}}).facts()
    over = decided(done, before=replace(going_on, wants=(C,)))
    assert (over.since, over.round, over.moves) == (None, 7, {})
    assert over.reason == "the nodes that joined have their share"
    growing = nodes(node(A), node(B), node(C, NOW - 29.0))  # in slow start its share grows still
    assert decided(done, growing, going_on, replace(POLICY, slow_start=30.0)) == going_on


def test_what_nobody_can_be_asked_for_is_neither_an_end_nor_a_share() -> None:
    """A node lacks sessions, but those of the others are in Envoys that cannot be asked."""
    going_on = Rebalance(NOW - 20, "", 7, NOW - 15)
    older = Fleet({"x": {A: 30, B: 30}}, instances={}).facts()
    assert decided(older, before=going_on) is going_on
    late = nodes(node(A), node(B), node(C, NOW - 60.0))
    over = decided(older, late, going_on)
    assert over.since is None
    assert over.reason.startswith("no node in service is new any more; what those that joined may lack")
    assert decided(older) == Rebalance()


def test_a_round_stands_until_its_end_and_is_then_withdrawn() -> None:
    first = decided(FLEET.facts())
    later = Fleet({"x": {A: 20, B: 30, C: 10}, "y": FLEET.sessions["y"]}, NOW + 3, NOW + 2).facts()
    assert decided(later, before=first, now=NOW + 4.9) is first
    ended = decided(later, before=first, now=NOW + 5.0)
    assert ended == replace(first, moves={}, wants=())


@pytest.mark.parametrize(("began", "goes_on"), [(6.99, False), (7.0, True)])
def test_the_next_round_rests_on_reports_from_after_the_last_one(began: float, goes_on: bool) -> None:
    """A session may be on its way for a second then, and the module counts once a second."""
    ended = replace(decided(FLEET.facts()), moves={}, wants=())
    fleet = {"x": {A: 20, B: 20, C: 20}, "y": {A: 15, B: 15}}
    found = decided(Fleet(fleet, NOW + 9, NOW + began).facts(), before=ended, now=NOW + 9)
    if goes_on:
        assert (found.since, found.round, found.until) == (NOW, int(NOW) + 9, NOW + 14)
        assert found.moves == {A: {X: 3, Y: 2}, B: {X: 3, Y: 2}}
    else:
        assert found is ended


def test_rounds_are_numbered_upwards_whatever_the_clock_says() -> None:
    high = Rebalance(round=9_000_000_000)
    assert decided(FLEET.facts(), before=high).round == 9_000_000_001


def test_an_envoy_that_has_not_told_all_is_waited_for() -> None:
    assert decided(replace(FLEET, covered=frozenset((A, B))).facts()) == Rebalance()


def test_an_envoy_that_fell_silent_neither_gives_nor_makes_others_give_more() -> None:
    known = FLEET.facts()
    silent = replace(known.censuses["y"], at=NOW - 5.1, began=NOW - 8)
    found = decided(replace(known, censuses={**known.censuses, "y": silent}))
    # 60 sessions are sure, and there may be 90: no node may come below a third of those.
    assert found == Rebalance()
    surely = Fleet({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}).facts()
    silent = replace(surely.censuses["y"], at=NOW - 5.1, began=NOW - 8)
    found = decided(replace(surely, censuses={**surely.censuses, "y": silent}))
    assert found.moves == {A: {X: 18}, B: {X: 18}}
    nobody = {envoy: replace(census, at=NOW - 5.1) for envoy, census in known.censuses.items()}
    assert decided(replace(known, censuses=nobody)) == Rebalance()


def test_who_does_not_say_which_process_it_is_or_has_no_module_is_not_asked() -> None:
    older = replace(FLEET, instances={"x": X}).facts()
    assert decided(older).moves == {A: {X: 15}, B: {X: 15}}
    few = Fleet({"x": {A: 4, B: 2}, "y": {A: 41, B: 43}}, instances={"x": X}).facts()
    assert decided(few).moves == {A: {X: 4}, B: {X: 2}}
    plain = EnvoyLoad("z", NOW, {A: 41, B: 43})
    mixed = replace(Fleet({"x": {A: 4, B: 2}}).facts(), loads={"z": plain}, live=dict(plain.live))
    assert decided(mixed).moves == {A: {X: 4}, B: {X: 2}}
    unused = replace(FLEET.facts().censuses["x"], has_served=False)
    assert decided(replace(FLEET.facts(), censuses={"x": unused})) == Rebalance()


def test_nothing_is_asked_for_while_the_fleet_comes_back() -> None:
    assert decided(replace(FLEET.facts(), began=NOW - 14.9)) == Rebalance()
    assert decided(replace(FLEET.facts(), began=NOW - 15.0)).moves


def test_a_round_is_withdrawn_when_what_it_rests_on_is_gone() -> None:
    first = decided(FLEET.facts())
    off = decided(FLEET.facts(), before=first, policy=replace(POLICY, rebalance=False), now=NOW + 1)
    assert (off.since, off.moves, off.until, off.reason) == (None, {}, NOW + 1, "it was switched off")
    held = decided(FLEET.facts(), before=first, floor="only 1 of 9 passes", now=NOW + 1)
    assert (held.since, held.moves) == (None, {})
    left = nodes(node(A), node(B, state=State.DRAINING), node(C, NOW))
    less = rebalance(left, "", Plan(JOINED, "", first), FLEET.facts(), POLICY, NOW + 1)
    assert less == replace(first, moves={}, wants=(), until=NOW + 1)
    heavier = nodes(node(A), node(B, weight=200), node(C, NOW))
    other = rebalance(heavier, "", Plan(JOINED, "", first), FLEET.facts(), POLICY, NOW + 1)
    assert other == less
    with_another = nodes(node(A), node(B), node(C, NOW))
    assert rebalance(with_another, "", Plan(JOINED, "", first), FLEET.facts(), POLICY, NOW + 1) is first
    alone = nodes(node(A), node(B), node(C, state=State.UNHEALTHY))
    none = rebalance(alone, "", Plan(JOINED, "", first), FLEET.facts(), POLICY, NOW + 1)
    assert (none.since, none.moves, none.until) == (None, {}, NOW + 1)
    assert rebalance(alone, "", Plan(alone, "", none), FLEET.facts(), POLICY, NOW + 2) is none


def test_equal_facts_give_equal_rounds() -> None:
    mirrored = Facts(
        censuses=dict(reversed(list(FLEET.facts().censuses.items()))),
        counted=dict(reversed(list(FLEET.facts().counted.items()))),
    )
    turned = dict(reversed(JOINED.items()))
    found = decided(mirrored, turned)
    assert found == decided(FLEET.facts())
    assert [list(moves) for moves in found.moves.values()] == [[X, Y], [X, Y]]


# --- whatever there is -------------------------------------------------------------------------------------

ADDRESSES = [f"10.0.0.{i}:4000" for i in range(1, 6)]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, NodePlan], Facts, Policy]:
    """Nodes of any weight and age, and Envoys of all kinds with any sessions."""
    planned = nodes(
        *(
            node(a, NOW - draw(st.sampled_from([0.0, 10.0, 40.0, 500.0])), draw(st.integers(1, 300)))
            for a in ADDRESSES[: draw(st.integers(1, 5))]
        )
    )
    censuses, loads = {}, {}
    counted: dict[str, int] = {}
    live: dict[str, int] = {}
    for index in range(draw(st.integers(1, 5))):
        envoy, kind = f"e{index}", draw(st.sampled_from(["good", "good", "silent", "older", "plain"]))
        there = {a: draw(st.integers(0, 200)) for a in planned}
        if kind == "plain":
            loads[envoy] = EnvoyLoad(envoy, NOW, there)
        else:
            at = NOW - 30 if kind == "silent" else NOW
            instance = "" if kind == "older" else f"{index:016x}"
            censuses[envoy] = Census(at, at - 2, there, frozenset(ADDRESSES), instance=instance)
        sums = live if kind == "plain" else counted
        for address, count in there.items():
            sums[address] = sums.get(address, 0) + count
    policy = replace(POLICY, slow_start=30.0, rebalance_per_second=draw(st.sampled_from([1.0, 20.0, 9e9])))
    return planned, Facts(censuses=censuses, loads=loads, counted=counted, live=live), policy


@given(fleets())
def test_no_node_gives_below_its_share_and_nobody_more_than_it_has(
    drawn: tuple[dict[str, NodePlan], Facts, Policy],
) -> None:
    planned, facts, policy = drawn
    found = decided(facts, planned, policy=policy)
    silent = [c for c in facts.censuses.values() if c.at < NOW]
    most = {a: facts.counted.get(a, 0) + facts.live.get(a, 0) for a in planned}
    least = {a: count - sum(c.sessions.get(a, 0) for c in silent) for a, count in most.items()}
    ramps = {a: _ramp(NOW - (p.active_since or 0.0)) for a, p in planned.items()}
    capacities = {a: p.node.weight * ramps[a] for a, p in planned.items()}
    shares = {a: sum(most.values()) * c / sum(capacities.values()) for a, c in capacities.items()}
    givers = {c.instance: c for c in facts.censuses.values() if c.instance and c.at == NOW}
    total = 0
    for address, moves in found.moves.items():
        assert moves
        assert all(count >= 1 for count in moves.values())
        assert least[address] - sum(moves.values()) >= shares[address] - 1e-6
        for instance, count in moves.items():
            assert count <= givers[instance].sessions[address]
        total += sum(moves.values())
    assert total <= policy.rebalance_per_second * ROUND
    joined = [a for a, p in planned.items() if NOW - (p.active_since or 0.0) < 90.0]
    assert total <= sum(max(0.0, shares[a] - least[a]) for a in joined) + 1e-6
    assert bool(found.moves) == (found.since is not None)


def _ramp(active_for: float) -> float:
    return {0.0: 0.1, 10.0: 0.1 + 0.9 * 0.3}.get(active_for, 1.0)


@given(fleets(), st.floats(0, 7.0))
def test_without_new_reports_nothing_is_asked_for(
    drawn: tuple[dict[str, NodePlan], Facts, Policy], age: float
) -> None:
    planned, facts, policy = drawn
    before = Rebalance(NOW - 100, "", 1, NOW)  # a round that has just ended, of which nobody has told yet
    assert not decided(facts, planned, before, policy, NOW + age).moves
