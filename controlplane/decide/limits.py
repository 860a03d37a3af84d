"""Divide the limits of client connections among the Envoys. No I/O.

Each Envoy process gets a quota of each limit: the connections that it has, and a share of those that are
still free. Quotas follow the connections: an Envoy with few connections left gets more, and others then get
less. A quota is raised only by what the Envoys have given up, that is after they have reported a lower quota.
So the sum of the quotas in force does not exceed the limit
(docs/internals/decisions/0022-limits-are-divided-into-quotas.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from controlplane.decide.inputs import Inputs
from controlplane.model.facts import Facts
from controlplane.model.limits import LimitPlan, LimitRule, LimitUsage
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.traffic import ModuleReport

# The Envoys that have to refuse connections get this many times the share of all others together.
_DEMAND_WEIGHT = 8
# A module counts once a second, and a report may contain counts of the report before.
_COUNT_LAG_SECONDS, _MIN_REPORT_INTERVAL_SECONDS = 1.5, 1.0
# How long quotas stay unchanged after all reports show the last change, unless the rules or the Envoys
# change: each change is sent to all Envoys.
_PAUSE_SECONDS = 1.0
# What an Envoy may use before its first report changes only by more than this number, and by more than this
# part of the limit.
_MIN_UNLISTED_CHANGE, _UNLISTED_CHANGE_DIVISOR = 2, 20
_NO_USAGE = LimitUsage()


class EnvoyUsage(NamedTuple):
    """What an Envoy process uses of a limit."""

    connections: int
    quota: int  # the connections that it may have at present, whatever is published now
    needs_more: bool = False  # its quota has refused connections recently
    is_reachable: bool = True  # False: its quota cannot change now
    is_ending: bool = False  # it accepts no connection any more

    @property
    def claimed(self) -> int:
        """The connections that it may have at present."""
        if self.is_ending and not self.is_reachable:
            return self.connections  # it has probably ended
        return max(self.quota, self.connections)


def plan_limits(inputs: Inputs, *, may_raise: bool = True) -> Mapping[str, LimitPlan]:
    """Return the next division of each limit, by name of the rule.

    Without `may_raise`, no quota increases: other replicas decide about quotas, too.
    """
    previous, facts, policy = inputs.previous.limits, inputs.facts, inputs.policy
    if not policy.limits:
        return EMPTY_MAP
    reports = {report.instance: report for report in facts.module_reports.values() if report.instance}
    silent = frozenset(name for name, r in reports.items() if r.at < inputs.reports_stale_before)
    report_lag = _COUNT_LAG_SECONDS + max(_MIN_REPORT_INTERVAL_SECONDS, policy.report_interval)
    # Soon after the start, Envoys may still enforce quotas of a newer plan than the one that was loaded here.
    may_raise = may_raise and inputs.now >= facts.observing_since + report_lag + _PAUSE_SECONDS
    newcomers = _newcomers(facts)
    is_complete = not newcomers and inputs.now >= facts.observing_since + policy.reconnect_grace
    ended = sum(reports[name].is_ending for name in silent)
    envoys = max(1, len(reports) - ended + newcomers)
    return {
        rule.name: _plan_limit(
            rule,
            previous.get(rule.name),
            _usages(rule, previous.get(rule.name), reports, silent, report_lag, is_complete=is_complete),
            {instance: report.envoy for instance, report in reports.items()},
            newcomers,
            envoys,
            inputs.now,
            report_lag + _PAUSE_SECONDS,
            may_raise=may_raise or rule.name not in previous,
        )
        for rule in policy.limits
    }


def assign_quotas(
    limit: int, envoys: Mapping[str, EnvoyUsage], *, may_raise: bool = True
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the quotas that the Envoys should have, and those that they may get now, by instance.

    If the present quotas do not exceed the limit, then neither does the sum of max(present, next) over all
    Envoys. So it does not matter when each Envoy applies its new quota.
    """
    targets = _fair_quotas(limit, envoys)
    in_use = {name: usage.claimed for name, usage in envoys.items()}
    wanted = {name: target - in_use[name] for name, target in targets.items() if target > in_use[name]}
    available = min(limit - sum(in_use.values()), sum(wanted.values())) if may_raise else 0
    raises = _apportion(max(0, available), wanted, [name for name in _by_need(envoys) if name in wanted])
    return targets, {
        name: min(target, in_use[name] + raises.get(name, 0)) for name, target in targets.items()
    }


def _fair_quotas(limit: int, envoys: Mapping[str, EnvoyUsage]) -> dict[str, int]:
    held = {name: u.connections if u.is_reachable else u.claimed for name, u in envoys.items()}
    fixed = {name: held[name] for name, usage in envoys.items() if not usage.is_reachable}
    reachable = [name for name in _by_need(envoys) if name not in fixed]
    free = limit - sum(held.values())
    if free < 0:
        # More connections than the limit allows: quotas below the counts, so that no Envoy accepts any before
        # enough of all connections are closed.
        counts = {name: held[name] for name in reachable}
        return fixed | _apportion(max(0, limit - sum(fixed.values())), counts, reachable)
    open_ones = [name for name in reachable if not envoys[name].is_ending]
    needy = sum(envoys[name].needs_more for name in open_ones)
    needy_weight = _DEMAND_WEIGHT * (len(open_ones) - needy) or 1
    weights = {name: needy_weight if envoys[name].needs_more else max(1, needy) for name in open_ones}
    shares = dict.fromkeys(reachable, 0) | _apportion(free, weights, open_ones)
    return fixed | {name: held[name] + shares[name] for name in reachable}


def _by_need(envoys: Mapping[str, EnvoyUsage]) -> list[str]:
    """Return the Envoys in the order for what division leaves over: those that need more first, then the
    fullest."""
    return sorted(envoys, key=lambda name: (not envoys[name].needs_more, -envoys[name].connections, name))


def _apportion(total: int, weights: Mapping[str, int], order: list[str]) -> dict[str, int]:
    """Divide a number in proportion to weights. The first ones of `order` get what division leaves over."""
    weight_sum = sum(weights.values())
    if not weight_sum:
        return dict.fromkeys(order, 0)
    parts = {name: total * weights[name] // weight_sum for name in order}
    rest = total - sum(parts.values())
    for name in [name for name in order if weights[name]][:rest]:
        parts[name] += 1
    return parts


def _newcomers(facts: Facts) -> int:
    """Return how many Envoys may have the module, but have not reported yet."""
    without_module = facts.loads.keys() - facts.module_envoys
    return len(facts.envoys_last_seen.keys() - facts.module_reports.keys() - without_module)


def _usages(
    rule: LimitRule,
    previous: LimitPlan | None,
    reports: Mapping[str, ModuleReport],
    silent: frozenset[str],
    report_lag: float,
    *,
    is_complete: bool,
) -> dict[str, EnvoyUsage]:
    """Return what each Envoy process uses of a limit.

    `report_lag`: a report shows the state of an Envoy at most this many seconds before.
    `is_complete`: all running Envoys have reported; so a process of the previous plan without a report no
    longer runs.
    """
    before = previous or LimitPlan(rule)
    in_force = {**before.quotas, **before.in_force}
    usages = {}
    for instance, report in reports.items():
        usage = report.limits.get(rule.name, _NO_USAGE)
        shows_quota = report.at >= before.changed_at + report_lag
        quota = max(usage.quota, (before.quotas if shows_quota else in_force).get(instance, 0))
        usages[instance] = EnvoyUsage(
            usage.connections, quota, usage.is_over_quota, instance not in silent, report.is_ending
        )
    if not is_complete:
        reported_ids = {report.envoy for report in reports.values()}
        usages |= {
            instance: EnvoyUsage(0, quota, is_reachable=False)
            for instance, quota in in_force.items()
            # A process has ended if another one with the id of its Envoy has reported.
            if instance not in reports and before.ids.get(instance) not in reported_ids
        }
    return usages


def _plan_limit(
    rule: LimitRule,
    previous: LimitPlan | None,
    usages: Mapping[str, EnvoyUsage],
    reported_ids: Mapping[str, str],
    newcomers: int,
    envoys: int,
    now: float,
    min_interval: float,
    *,
    may_raise: bool,
) -> LimitPlan:
    limit = rule.max_connections
    if not limit:
        return LimitPlan(rule, envoys=envoys)
    targets, quotas = assign_quotas(limit, usages, may_raise=may_raise)
    free = max(0, limit - sum(usage.connections for usage in usages.values()))
    unlisted = free // (len(usages) + max(1, newcomers))
    if previous is not None and previous.rule == rule and previous.quotas.keys() == quotas.keys():
        must_change = now - previous.changed_at >= min_interval and (
            (quotas != previous.quotas and is_due(previous.quotas, targets, usages))
            or abs(unlisted - previous.unlisted)
            > max(_MIN_UNLISTED_CHANGE, limit // _UNLISTED_CHANGE_DIVISOR)
        )
        if not must_change:
            is_same_fleet = previous.envoys == envoys
            return previous if is_same_fleet else replace(previous, envoys=envoys, unlisted=unlisted)
    in_force = {name: usage.quota for name, usage in usages.items() if usage.quota > quotas[name]}
    known_ids = {**(previous.ids if previous is not None else EMPTY_MAP), **reported_ids}
    ids = {instance: known_ids[instance] for instance in quotas if instance in known_ids}
    return LimitPlan(rule, quotas, unlisted, envoys, in_force, ids, now)


def is_due(quotas: Mapping[str, int], targets: Mapping[str, int], envoys: Mapping[str, EnvoyUsage]) -> bool:
    """Return whether the quotas must change: an Envoy has less than half of its share of what is free."""
    return any(
        usage.is_reachable and 2 * (quotas[name] - usage.connections) < targets[name] - usage.connections
        for name, usage in envoys.items()
    ) or sum(quotas.values()) > sum(targets.values())
