"""Builds a rollout's view of its own nodes and of the relevant other nodes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from controlplane.decide import session_counts
from controlplane.decide.health_verdict import VerdictKind, evaluate_health
from controlplane.decide.node_sources import all_sources_complete
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import EMPTY_MAP, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import IN_PROGRESS, Rollout, Stage
from controlplane.model.views import DrainProgress

_UNCHECKED_HEALTH = Health()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The engine's state at one moment."""

    plan: Plan
    facts: Facts
    intents: Intents
    policy: Policy
    envoys: Sequence[EnvoyStatus] = ()
    drain_progress: Callable[[str], DrainProgress | None] = lambda _: None  # by address


@dataclass(frozen=True, slots=True)
class LoginResult:
    """The result of a login probe: a session on a node that ran the statement of `rollouts.probe`."""

    at: float
    problem: str = ""  # why it failed, as a clause about the node; empty: it succeeded


@dataclass(frozen=True, slots=True)
class RolloutNodeView:
    """A rollout's view of one of its nodes."""

    state: State
    reason: str = ""  # of the state
    is_empty: bool = False  # confirmed to have no sessions
    sessions: int | None = None
    started_at: float | None = None
    version: str = ""  # its release; empty: unknown
    drain: DrainIntent | None = None
    is_removed: bool = False  # an operator removed it
    # Since when it has been registered with this start time and passing its checks; None: it is not.
    healthy_since: float | None = None
    failure: str = ""  # why `healthy_since` is None, as a clause about the node
    greeted_at: float | None = None  # when the check of its SQL port passed last
    is_warmed_up: bool = False  # it is in service, and its slow start is over
    moved: int = 0  # sessions that migrated since the drain began
    failed: int = 0  # failed migrations since the drain began
    login_result: LoginResult | None = None  # the latest


@dataclass(frozen=True, slots=True)
class RolloutView:
    """All inputs of one rollout's decisions."""

    # The nodes of its steps that are known.
    nodes: Mapping[str, RolloutNodeView] = field(default_factory=lambda: EMPTY_MAP)
    observing_since: float = 0.0  # when this control plane began to observe
    is_complete: bool = True  # every source has listed all its nodes, so a missing node does not exist
    # Nodes out of service that no operator drained or removed and this rollout did not drain -> reason.
    unavailable: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    active: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # nodes in service -> their group
    drained_by_us: frozenset[str] = frozenset()  # drained by this rollout
    in_other_rollouts: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # node -> rollout id
    checks_sql: bool = True  # SQL ports are checked
    probes_login: bool = False  # the login probe is configured


class HealthStreak(NamedTuple):
    """Since when a node has been healthy; carried from one pass to the next."""

    started_at: float | None
    since: float
    consecutive: tuple[int, int]  # SQL and status checks; a decrease means a failure


def observe(
    cluster: ClusterState, rollout: Rollout, previous: Mapping[str, HealthStreak], now: float
) -> tuple[RolloutView, Mapping[str, HealthStreak]]:
    """Return one rollout's view and the health streaks for the next pass.

    The view lacks `observing_since`, `in_other_rollouts` and login results. Health is tracked only from a
    node's turn on, because thousands of nodes may be pending.
    """
    plan, intents = cluster.plan, cluster.intents
    unavailable, active = {}, {}
    for address, planned in plan.nodes.items():
        if planned.state is State.ACTIVE:
            active[address] = planned.group
        elif _is_unexpectedly_unavailable(address, planned, intents, rollout.id):
            unavailable[address] = f"{address} is {planned.state}: {planned.reason}"
    nodes, health_streaks = {}, {}
    for address, step in rollout.steps.items():
        if step.stage in (Stage.DONE, Stage.SKIPPED) or address not in plan.nodes:
            continue
        streak, failure = None, ""
        if step.drain_requested_at is not None:
            streak, failure = _update_health_streak(plan.nodes[address], cluster, previous.get(address), now)
        if streak is not None:
            health_streaks[address] = streak
        nodes[address] = _build_node_view(address, cluster, streak, failure, now)
    drained_by_us = frozenset(
        address for address, drain in intents.drains.items() if drain.owner == rollout.id
    )
    view = RolloutView(
        nodes,
        is_complete=all_sources_complete(cluster.facts),
        unavailable=unavailable,
        active=active,
        drained_by_us=drained_by_us,
        checks_sql=cluster.policy.sql_check,
    )
    return view, health_streaks


def with_other_rollouts(
    view: RolloutView, rollout: Rollout, active_rollouts: Iterable[Rollout]
) -> RolloutView:
    """Return the view with the nodes of other rollouts. `active_rollouts` are sorted oldest first.

    A node in progress in another rollout counts as out of service by that rollout's record, because its drain
    may not be observed yet. Pending and failed nodes of an older rollout stay with that rollout.
    """
    in_other_rollouts, unavailable, is_older = {}, {}, True
    for other in active_rollouts:
        if other.id == rollout.id:
            is_older = False
            continue
        for address, step in other.steps.items():
            if step.stage in IN_PROGRESS:
                in_other_rollouts[address] = other.id
                unavailable[address] = f"the rollout {other.id} is working on {address}"
            elif is_older and step.stage in (Stage.PENDING, Stage.FAILED):
                in_other_rollouts[address] = other.id
    active = {address: group for address, group in view.active.items() if address not in unavailable}
    return replace(
        view,
        in_other_rollouts=in_other_rollouts,
        unavailable={**view.unavailable, **unavailable},
        active=active,
    )


def _is_unexpectedly_unavailable(address: str, planned: NodePlan, intents: Intents, rollout_id: str) -> bool:
    """Return whether a node is out of service although no operator asked for that."""
    if planned.state is State.JOINING or address in intents.removed:
        return False
    drain = intents.drains.get(address)
    return drain is None or drain.owner not in ("", rollout_id)


def _build_node_view(
    address: str, cluster: ClusterState, streak: HealthStreak | None, failure: str, now: float
) -> RolloutNodeView:
    planned, policy = cluster.plan.nodes[address], cluster.policy
    sql = cluster.facts.health.get(address, _UNCHECKED_HEALTH).sql
    drain_progress = cluster.drain_progress(address)
    active_since = planned.active_since
    return RolloutNodeView(
        state=planned.state,
        reason=planned.reason,
        is_empty=planned.state is State.DRAINED
        or (planned.state is State.GONE and planned.eds_health is None),
        sessions=session_counts.session_count(address, planned.endpoint, cluster.facts),
        started_at=planned.node.started_at,
        version=planned.version,
        drain=cluster.intents.drains.get(address),
        is_removed=address in cluster.intents.removed,
        healthy_since=streak.since if streak is not None else None,
        failure=failure,
        greeted_at=sql.at if sql is not None and sql.status is CheckStatus.PASS else None,
        is_warmed_up=active_since is not None and now - active_since >= policy.slow_start,
        moved=drain_progress.moved if drain_progress is not None else 0,
        failed=sum(drain_progress.failed.values()) if drain_progress is not None else 0,
    )


def _update_health_streak(
    planned: NodePlan, cluster: ClusterState, previous: HealthStreak | None, now: float
) -> tuple[HealthStreak | None, str]:
    """Return since when a node is registered and passing its checks, or None and why it is not."""
    node = planned.node
    if planned.removal_since is not None:
        return None, "is not registered"
    if not node.registered:
        return None, "is registered, but its `ttl` is missing"
    health = cluster.facts.health.get(node.address, _UNCHECKED_HEALTH)
    has_status = node.status_address is not None
    verdict = evaluate_health(
        health, has_status_address=has_status, recovering=False, serving=False, policy=cluster.policy
    )
    if verdict.kind is not VerdictKind.UP:
        return None, f"does not pass its checks: {verdict.reason}"
    consecutive = (_consecutive(health.sql), _consecutive(health.status))
    same = previous is not None and previous.started_at == node.started_at
    if (
        previous is not None
        and same
        and all(new >= old for new, old in zip(consecutive, previous.consecutive, strict=True))
    ):
        return previous._replace(consecutive=consecutive), ""
    return HealthStreak(node.started_at, now, consecutive), ""


def _consecutive(probe: CheckResult | None) -> int:
    return probe.consecutive if probe is not None else 0
