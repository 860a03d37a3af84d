"""Builds a rollout's view of its own nodes and of the relevant other nodes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.decide import session_counts
from controlplane.decide.lifecycle import VerdictKind, evaluate_health
from controlplane.decide.node_sources import all_sources_complete
from controlplane.model.comparison import VerificationReport
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import EMPTY_MAP, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import IN_PROGRESS, Rollout, Stage, Step
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
    drain_progress_of: Callable[[str], DrainProgress | None] = lambda _: None  # by address


@dataclass(frozen=True, slots=True)
class LoginResult:
    """The result of a login probe, which runs the statement of `rollouts.probe` on a node."""

    at: float
    problem: str = ""  # why it failed, as a clause about the node; empty if it succeeded


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The end of a verification: a report, or the reason why there is none."""

    problem: str = ""  # as a sentence
    report: VerificationReport | None = None


@dataclass(frozen=True, slots=True)
class RolloutNodeView:
    """A rollout's view of one of its nodes."""

    state: State
    reason: str = ""  # of the state
    is_empty: bool = False  # confirmed to have no sessions
    sessions: int | None = None
    started_at: float | None = None
    version: str = ""  # its TiDB release; empty if it is unknown
    drain: DrainIntent | None = None
    drain_progress: DrainProgress | None = None
    is_removed: bool = False  # an operator removed it
    # Since when the node has been registered with this `started_at` and has passed its checks. None if it is
    # not registered, fails a check, or is still pending.
    healthy_since: float | None = None
    failure: str = ""  # why `healthy_since` is None, as a clause about the node
    # How many SQL, status and statement checks in a row had the same result.
    consecutive: tuple[int, ...] = (0, 0, 0)
    greeted_at: float | None = None  # when its SQL port was checked last; None if that check failed
    is_warmed_up: bool = False  # it is in service, and its slow start is over
    login_result: LoginResult | None = None  # the latest


@dataclass(frozen=True, slots=True)
class RolloutView:
    """All inputs of one rollout's decisions."""

    # The known nodes of the rollout, without done and skipped ones.
    nodes: Mapping[str, RolloutNodeView] = field(default_factory=lambda: EMPTY_MAP)
    observing_since: float = 0.0  # when this control plane began to observe
    is_complete: bool = True  # every source has listed all its nodes, so a missing node does not exist
    # Why nodes are out of service, by address, without nodes that an operator or this rollout took out.
    unavailable: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    active: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # groups of the nodes in service
    owned_drains: frozenset[str] = frozenset()  # nodes whose drains this rollout owns
    in_other_rollouts: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # node -> rollout id
    checks_sql: bool = True  # SQL ports are checked
    probes_login: bool = False  # the login probe is configured


def observe(
    cluster: ClusterState,
    rollout: Rollout,
    active_rollouts: Iterable[Rollout],
    logins: Mapping[str, LoginResult] | None,
    previous: RolloutView,
    now: float,
) -> RolloutView:
    """Return one rollout's view. Nodes keep their `healthy_since` from `previous`, the preceding view.

    `active_rollouts` are sorted oldest first; `logins` is None if the login probe is not configured.
    """
    plan, drains = cluster.plan, cluster.intents.drains
    in_other_rollouts, unavailable = _nodes_of_other_rollouts(rollout, active_rollouts)
    active = {}
    for address, planned in plan.nodes.items():
        if address in unavailable:
            continue
        if planned.state is State.ACTIVE:
            active[address] = planned.group
        elif _is_unexpectedly_unavailable(address, planned, cluster.intents, rollout.id):
            unavailable[address] = f"{address} is {planned.state}: {planned.reason}"
    return RolloutView(
        {
            address: _view_node(step, cluster, previous.nodes.get(address), (logins or {}).get(address), now)
            for address, step in rollout.steps.items()
            if step.stage not in (Stage.DONE, Stage.SKIPPED) and address in plan.nodes
        },
        observing_since=previous.observing_since,
        is_complete=all_sources_complete(cluster.facts),
        unavailable=unavailable,
        active=active,
        owned_drains=frozenset(address for address, drain in drains.items() if drain.owner == rollout.id),
        in_other_rollouts=in_other_rollouts,
        checks_sql=cluster.policy.sql_check,
        probes_login=logins is not None,
    )


def _nodes_of_other_rollouts(
    rollout: Rollout, active_rollouts: Iterable[Rollout]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return which node is in which other rollout, and why the nodes in progress are unavailable.

    A node that another rollout works on counts as out of service even before its drain is observed. Pending
    and failed nodes of an older rollout stay with that rollout.
    """
    in_other_rollouts, unavailable, is_older = dict[str, str](), dict[str, str](), True
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
    return in_other_rollouts, unavailable


def _is_unexpectedly_unavailable(address: str, planned: NodePlan, intents: Intents, rollout_id: str) -> bool:
    """Return whether a node is out of service although no operator asked for that."""
    if planned.state is State.JOINING or address in intents.removed:
        return False
    drain = intents.drains.get(address)
    return drain is None or drain.owner not in ("", rollout_id)


def _view_node(
    step: Step,
    cluster: ClusterState,
    previous: RolloutNodeView | None,
    login_result: LoginResult | None,
    now: float,
) -> RolloutNodeView:
    planned, policy = cluster.plan.nodes[step.address], cluster.policy
    node, address, active_since = planned.node, step.address, planned.active_since
    health = cluster.facts.health.get(address, _UNCHECKED_HEALTH)
    sql, checks = health.sql, (health.sql, health.status, health.statement)
    consecutive = tuple(check.consecutive if check is not None else 0 for check in checks)
    # Health is tracked only from a node's turn on, because thousands of nodes may be pending.
    is_tracked = step.drain_requested_at is not None
    failure = _health_failure(planned, health, policy) if is_tracked else ""
    healthy_since = now if is_tracked and not failure else None
    # If a number of equal results in a row has decreased, a check failed between the two views.
    if (
        healthy_since is not None
        and previous is not None
        and previous.healthy_since is not None
        and previous.started_at == node.started_at
        and all(new >= old for new, old in zip(consecutive, previous.consecutive, strict=True))
    ):
        healthy_since = previous.healthy_since
    return RolloutNodeView(
        state=planned.state,
        reason=planned.reason,
        is_empty=planned.state is State.DRAINED
        or (planned.state is State.GONE and planned.eds_health is None),
        sessions=session_counts.session_count(address, planned.endpoint, cluster.facts),
        started_at=node.started_at,
        version=planned.version,
        drain=cluster.intents.drains.get(address),
        drain_progress=cluster.drain_progress_of(address),
        is_removed=address in cluster.intents.removed,
        healthy_since=healthy_since,
        failure=failure,
        consecutive=consecutive,
        greeted_at=sql.at if sql is not None and sql.status is CheckStatus.PASS else None,
        is_warmed_up=active_since is not None and now - active_since >= policy.slow_start,
        login_result=login_result,
    )


def _health_failure(planned: NodePlan, health: Health, policy: Policy) -> str:
    """Return a clause that says why a node is not registered or fails its checks; empty if it is healthy."""
    if planned.removal_since is not None:
        return "is not registered"
    if not planned.node.registered:
        return "is registered, but its `ttl` is missing"
    has_status = planned.node.status_address is not None
    verdict = evaluate_health(
        health, has_status_address=has_status, recovering=False, serving=False, policy=policy
    )
    return "" if verdict.kind is VerdictKind.UP else f"does not pass its checks: {verdict.reason}"
