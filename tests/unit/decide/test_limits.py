"""Limits of client connections are divided among the Envoys without exceeding them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.inputs import Inputs
from controlplane.decide.limits import EnvoyUsage, assign_quotas, is_due, plan_limits
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.limits import LimitPlan, LimitRule, LimitUsage
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import ModuleReport

NOW = 1_000_000.0
RULE = LimitRule("reporting", user="report", max_connections=20, max_new_per_second=6.0)
POLICY = Policy(limits=(RULE,))


@dataclass
class Fleet:
    """Simulates Envoys that report and apply quotas, and the control plane's loop."""

    usages: dict[str, LimitUsage]
    rule: LimitRule = RULE
    now: float = NOW
    plan: Plan = field(default_factory=Plan)
    may_raise: bool = True

    @property
    def limit(self) -> LimitPlan:
        return self.plan.limits[self.rule.name]

    @property
    def connections(self) -> int:
        return sum(usage.connections for usage in self.usages.values())

    def facts(self) -> Facts:
        reports = {
            f"envoy-{name}": ModuleReport(
                f"envoy-{name}", self.now, instance=name, limits={self.rule.name: usage}
            )
            for name, usage in self.usages.items()
        }
        return Facts(module_reports=reports, envoys_last_seen=dict.fromkeys(reports, self.now))

    def decide(self, facts: Facts | None = None) -> LimitPlan:
        policy = replace(POLICY, limits=(self.rule,))
        inputs = Inputs(self.plan, self.facts() if facts is None else facts, policy, self.now)
        self.plan = Plan(limits=plan_limits(inputs, may_raise=self.may_raise))
        return self.limit

    def step(self, demand: Mapping[str, int], seconds: float = 3.5) -> None:
        """Decide; let the Envoys apply their quotas, and each open or close connections up to `demand`."""
        limit = self.decide()
        for name, usage in self.usages.items():
            applied = replace(usage, quota=limit.quotas[name])
            self.usages[name] = with_demand(applied, demand.get(name, usage.connections))
        self.now += seconds


def with_demand(usage: LimitUsage, connections: int) -> LimitUsage:
    """Return the usage after the Envoy's clients wanted to have this many connections."""
    allowed = max(usage.connections, usage.quota)
    return replace(usage, connections=min(connections, allowed), is_over_quota=connections > usage.quota)


class DelayedEnvoy:
    """An Envoy that may apply and report quotas late, and whose reports may mix two states of it."""

    def __init__(self, name: str, at: float) -> None:
        self.report = ModuleReport(name, at, instance=name)
        self.usage = LimitUsage()
        self._flushed = LimitUsage()  # the state in its last report
        self._quota_before = 0

    def step(self, quota: int | None, demands: tuple[int, int], contents: str, at: float) -> None:
        """Apply a quota, if any, between two changes of the demand, and send a report with `contents`."""
        self.usage = with_demand(self.usage, demands[0])
        if quota is not None:
            self.usage = replace(self.usage, quota=quota)
        self.usage = with_demand(self.usage, demands[1])
        if contents == "nothing":
            return
        reported = self.usage
        if contents == "old connections":
            reported = replace(reported, connections=self._flushed.connections)
        elif contents == "old quota":
            reported = replace(reported, quota=self._flushed.quota)
        # As in TelemetryStream: the larger one of the last two quotas.
        shown = replace(reported, quota=max(reported.quota, self._quota_before))
        self._quota_before, self._flushed = reported.quota, self.usage
        self.report = replace(self.report, at=at, limits={RULE.name: shown})


usages = st.builds(
    EnvoyUsage,
    connections=st.integers(0, 40),
    quota=st.integers(0, 60),
    needs_more=st.booleans(),
    is_reachable=st.booleans(),
    is_ending=st.booleans(),
)
fleets = st.dictionaries(st.sampled_from("abcdefg"), usages, max_size=7)


@given(st.integers(1, 200), fleets)
def test_quotas_never_exceed_the_limit_together_with_those_in_force(
    limit: int, envoys: dict[str, EnvoyUsage]
) -> None:
    targets, quotas = assign_quotas(limit, envoys)
    in_use = {name: usage.claimed for name, usage in envoys.items()}
    assert targets.keys() == quotas.keys() == envoys.keys()
    assert min([0, *quotas.values(), *targets.values()]) == 0
    both = sum(max(quotas[name], in_use[name]) for name in envoys)
    assert both <= max(limit, sum(in_use.values()))
    unreachable = sum(in_use[name] for name, usage in envoys.items() if not usage.is_reachable)
    assert sum(targets.values()) <= max(limit, unreachable)
    _, not_raised = assign_quotas(limit, envoys, may_raise=False)
    assert all(not_raised[name] <= in_use[name] for name in envoys)


@given(st.integers(1, 200), fleets)
def test_free_connections_are_divided_fairly_and_completely(
    limit: int, envoys: dict[str, EnvoyUsage]
) -> None:
    envoys = {
        name: usage._replace(is_reachable=True, is_ending=False, needs_more=False)
        for name, usage in envoys.items()
    }
    free = limit - sum(usage.connections for usage in envoys.values())
    targets, _ = assign_quotas(limit, envoys)
    if not envoys or free < 0:
        return
    shares = [targets[name] - usage.connections for name, usage in envoys.items()]
    assert sum(shares) == free
    assert max(shares) - min(shares) <= 1


@given(
    st.integers(1, 60),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1, max_size=4),
)
def test_clients_reach_the_limit_wherever_they_connect(limit: int, demand: dict[str, int]) -> None:
    fleet = Fleet({name: LimitUsage() for name in "abcd"}, replace(RULE, max_connections=limit))
    for _ in range(40):
        fleet.step(demand)
        assert fleet.connections <= limit
    assert fleet.connections == min(limit, sum(demand.values()))


@given(st.integers(1, 60), st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 40)), max_size=20))
def test_connections_never_exceed_the_limit_while_demand_changes(
    limit: int, demands: list[dict[str, int]]
) -> None:
    fleet = Fleet({name: LimitUsage() for name in "abc"}, replace(RULE, max_connections=limit))
    for demand in demands:
        fleet.step(demand, seconds=1.0)
        assert fleet.connections <= limit


_delayed_step = st.tuples(
    st.booleans(),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.sampled_from(["nothing", "all", "old connections", "old quota"]),
)


@given(st.integers(1, 12), st.lists(st.fixed_dictionaries(dict.fromkeys("abc", _delayed_step)), max_size=30))
def test_connections_never_exceed_the_limit_while_quotas_and_reports_are_late(
    limit: int, steps: list[dict[str, tuple[bool, tuple[int, int], str]]]
) -> None:
    policy = Policy(limits=(replace(RULE, max_connections=limit),))
    now, plan = NOW, Plan()
    envoys = {name: DelayedEnvoy(name, now) for name in "abc"}
    for step in steps:
        reports = {name: envoy.report for name, envoy in envoys.items()}
        facts = Facts(module_reports=reports, envoys_last_seen=dict.fromkeys(reports, now))
        plan = Plan(limits=plan_limits(Inputs(plan, facts, policy, now)))
        quotas, now = plan.limits[RULE.name].quotas, now + 1
        for name, (applies_quota, demands, contents) in step.items():
            envoys[name].step(quotas[name] if applies_quota else None, demands, contents, now)
        assert sum(envoy.usage.connections for envoy in envoys.values()) <= limit


@pytest.mark.parametrize(
    ("limit", "count", "seconds"), [(20, 2, 13), (100, 4, 13), (1_000, 10, 29), (100_000, 100, 45)]
)
def test_one_envoy_of_many_can_use_the_whole_limit_after_seconds(
    limit: int, count: int, seconds: int
) -> None:
    policy = Policy(limits=(replace(RULE, max_connections=limit),))
    now, plan = NOW, Plan()
    envoys = {f"{number:03}": DelayedEnvoy(f"{number:03}", now) for number in range(count)}
    connections: list[int] = []
    for second in range(-10, seconds + 1):
        reports = {name: envoy.report for name, envoy in envoys.items()}
        facts = Facts(module_reports=reports, envoys_last_seen=dict.fromkeys(reports, now))
        plan = Plan(limits=plan_limits(Inputs(plan, facts, policy, now)))
        now += 1
        for name, envoy in envoys.items():
            demand = limit if name == "000" and second >= 0 else 0
            envoy.step(plan.limits[RULE.name].quotas[name], (demand, demand), "all", now)
        connections.append(envoys["000"].usage.connections)
    assert connections[-1] == limit
    assert connections[10 + 13] >= 0.9 * limit


def test_single_envoy_may_use_the_whole_limit() -> None:
    fleet = Fleet({"a": LimitUsage(7)})
    assert fleet.decide().quotas == {"a": 20}
    assert fleet.limit.envoys == 1


def test_quotas_stay_while_each_envoy_has_half_of_its_share() -> None:
    fleet = Fleet({"a": LimitUsage(), "b": LimitUsage()})
    first = fleet.decide()
    assert first.quotas == {"a": 10, "b": 10}
    fleet.now += 10
    fleet.usages = {"a": LimitUsage(6, 10), "b": LimitUsage(0, 10)}
    assert fleet.decide() is first
    fleet.now += 10
    fleet.usages["a"] = LimitUsage(8, 10)
    second = fleet.decide()
    assert second.quotas == {"a": 10, "b": 6}, "a gets more when b has reported its lower quota"
    fleet.usages["b"] = LimitUsage(0, 6)
    for _ in range(3):
        fleet.now += 1
        assert fleet.decide() is second, "quotas change at most every 3.5 s"
    fleet.now += 1
    assert fleet.decide().quotas == {"a": 14, "b": 6}


def test_changed_settings_and_envoys_take_effect_at_once() -> None:
    fleet = Fleet({"a": LimitUsage(8, 10), "b": LimitUsage(4, 10)})
    fleet.decide()
    fleet.rule = replace(RULE, max_connections=6)
    assert fleet.decide().quotas == {"a": 4, "b": 2}, "below the counts, so that no Envoy accepts more"
    fleet.rule = replace(RULE, max_connections=40)
    assert sum(fleet.decide().quotas.values()) == 40
    fleet.usages["c"] = LimitUsage()
    assert fleet.decide().envoys == 3
    assert fleet.limit.quotas["c"] == 0, "it gets a share when the others have given up something"
    assert fleet.limit.unlisted == 28 // 4


def test_envoy_that_needs_more_gets_most_of_what_is_free() -> None:
    envoys = {"a": EnvoyUsage(10, 10, needs_more=True), "b": EnvoyUsage(0, 90)}
    assert assign_quotas(100, envoys)[0] == {"a": 90, "b": 10}
    others = dict.fromkeys("bcde", EnvoyUsage(0, 20))
    assert assign_quotas(100, {"a": envoys["a"], **others})[0] == {"a": 91, "b": 3, "c": 2, "d": 2, "e": 2}
    last = {"a": EnvoyUsage(3, 3, needs_more=True), "b": EnvoyUsage(16, 17)}
    targets, _ = assign_quotas(20, last)
    assert targets == {"a": 4, "b": 16}
    assert is_due({"a": 3, "b": 17}, targets, last)


def test_silent_envoy_keeps_its_quota() -> None:
    fleet = Fleet({"a": LimitUsage(2, 10), "b": LimitUsage(2, 10)})
    fleet.decide()
    facts = fleet.facts()
    old = replace(facts.module_reports["envoy-b"], at=NOW - 60)
    facts = replace(facts, module_reports={**facts.module_reports, "envoy-b": old})
    fleet.now += 10
    fresh = replace(facts.module_reports["envoy-a"], at=fleet.now, limits={RULE.name: LimitUsage(9, 10)})
    facts = replace(facts, module_reports={**facts.module_reports, "envoy-a": fresh})
    limit = fleet.decide(facts)
    assert limit.quotas == {"a": 10, "b": 10}
    assert limit.envoys == 2, "a silent Envoy may still accept clients, so it counts for the rates"


def test_envoy_that_has_ended_in_a_drain_leaves_its_quota_to_the_one_that_replaces_it() -> None:
    fleet = Fleet({"a": LimitUsage(0, 20), "b": LimitUsage(0, 0, is_over_quota=True)})
    facts = fleet.facts()
    ended = replace(facts.module_reports["envoy-a"], at=NOW - 60, is_ending=True)
    facts = replace(facts, module_reports={**facts.module_reports, "envoy-a": ended})
    limit = fleet.decide(facts)
    assert (limit.quotas, limit.envoys) == ({"a": 0, "b": 20}, 1)


def test_draining_envoy_gets_no_share() -> None:
    envoys = {"a": EnvoyUsage(4, 10, is_ending=True), "b": EnvoyUsage(2, 10)}
    targets, _ = assign_quotas(20, envoys)
    assert targets == {"a": 4, "b": 16}


def test_new_process_of_an_envoy_gets_the_quota_of_the_one_before() -> None:
    """Also before all Envoys have reported, such as after a restart of the machine."""
    before = LimitPlan(RULE, {"old": 20}, ids={"old": "envoy-a"}, changed_at=NOW - 100)
    fleet = Fleet({"a": LimitUsage(3, 10)}, plan=Plan(limits={RULE.name: before}))
    facts = replace(
        fleet.facts(), observing_since=NOW - 10, envoys_last_seen={"envoy-a": NOW, "envoy-b": NOW}
    )
    assert fleet.decide(facts).quotas == {"a": 20}


@pytest.mark.parametrize("has_reported", [False, True])
def test_quotas_of_a_saved_plan_stay_until_all_envoys_have_reported(has_reported: bool) -> None:
    before = LimitPlan(RULE, {"a": 12, "b": 8}, changed_at=NOW - 100)
    fleet = Fleet({"a": LimitUsage(10, 12)}, plan=Plan(limits={RULE.name: before}))
    facts = replace(fleet.facts(), observing_since=NOW - 1_000)
    assert fleet.decide(facts).quotas == {"a": 20}, "b has ended"
    fleet.plan = Plan(limits={RULE.name: before})
    unknown = replace(facts, envoys_last_seen={"envoy-a": NOW, "envoy-b": NOW})
    if has_reported:  # load reports of an Envoy without the module
        unknown = replace(unknown, loads={"envoy-b": EnvoyLoad("envoy-b", NOW)})
    assert fleet.decide(unknown).quotas == ({"a": 20} if has_reported else {"a": 12, "b": 8})
    fleet.plan = Plan(limits={RULE.name: before})
    assert fleet.decide(replace(facts, observing_since=NOW - 1)).quotas == {"a": 12, "b": 8}


def test_no_quota_is_raised_just_after_the_start_unless_the_rule_is_new() -> None:
    before = LimitPlan(RULE, {"a": 5, "b": 5}, unlisted=5, envoys=2, changed_at=NOW - 100)
    fleet = Fleet({"a": LimitUsage(5, 5), "b": LimitUsage(0, 5)}, plan=Plan(limits={RULE.name: before}))
    just_started = replace(fleet.facts(), observing_since=NOW - 3)
    assert fleet.decide(just_started) is before
    assert fleet.decide(replace(just_started, observing_since=NOW - 4)).quotas == {"a": 13, "b": 7}
    fleet.plan = Plan()
    assert sum(fleet.decide(just_started).quotas.values()) == 20


def test_envoys_that_have_not_reported_share_what_is_free() -> None:
    fleet = Fleet({})
    assert fleet.decide().unlisted == 20
    facts = Facts(envoys_last_seen={"envoy-1": NOW, "envoy-2": NOW}, module_envoys={"envoy-1"})
    assert fleet.decide(facts).unlisted == 10
    assert fleet.limit.envoys == 2
    fleet = Fleet({"a": LimitUsage()})
    assert fleet.decide().unlisted == 10
    fleet.now += 10
    fleet.usages["a"] = LimitUsage(20, 20)
    assert fleet.decide().unlisted == 0, "nothing is free"


def test_standalone_replica_raises_no_quota() -> None:
    fleet = Fleet({"a": LimitUsage(8, 10), "b": LimitUsage(0, 2)}, may_raise=False)
    fleet.plan = Plan(limits={RULE.name: LimitPlan(RULE, {"a": 10, "b": 2})})
    assert fleet.decide().quotas == {"a": 10, "b": 2}
    fleet.rule = replace(RULE, max_connections=4)
    assert fleet.decide().quotas == {"a": 4, "b": 0}


def test_rules_without_a_limit_of_connections_have_no_quotas() -> None:
    fleet = Fleet({"a": LimitUsage(3), "b": LimitUsage()}, replace(RULE, max_connections=0))
    assert fleet.decide() == LimitPlan(fleet.rule, envoys=2)
    no_limits = plan_limits(Inputs(fleet.plan, fleet.facts(), Policy(), NOW))
    assert no_limits == {}
