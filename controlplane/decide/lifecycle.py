"""The state machine of one node: from its observation to its next state, EDS health and reason. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from controlplane.decide.health_verdict import HealthVerdict, VerdictKind, evaluate_health
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent, OnDeadline
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Policy

IN_SERVICE_REASON = "it passes its checks"

_SERVING_STATES = (State.ACTIVE, State.DRAINING, State.DRAINED)


class NodeObservation(NamedTuple):
    """Everything that the decision on one node depends on, beside its previous plan.

    A tuple: thousands are created per second, and creating a frozen dataclass takes five times as long.
    """

    node: Node
    is_listed: bool  # a source defines it, or its source has no complete list yet
    removed_since: float | None  # when an operator removed it
    drain: DrainIntent | None
    health: Health
    endpoint: str | None  # resolved SQL address; None: the name has never resolved
    resolve_error: str  # why the name does not resolve; empty: it does
    is_confirmed_empty: bool  # every Envoy has confirmed that no session is left
    has_sessions: bool  # at least one session is reported on it
    version: str = ""  # TiDB release; empty: not known
    is_overdue: bool = False  # the deadline of its drain has passed


def advance(
    past: NodePlan | None, observation: NodeObservation, policy: Policy, now: float
) -> NodePlan | None:
    """Return the next plan for a node with its weight unchanged, or None when the node leaves the plan.

    Rules by precedence: an operator removed it; its `info` was deleted; an operator drains it; it has no
    endpoint; its checks; its registration.
    """
    if observation.removed_since is not None or not observation.is_listed:
        return _removing(past, observation, policy, now)
    if observation.drain is not None:
        state = _drain_state(past, observation)
        overdue_note = _overdue_note(observation) if state is State.DRAINING else ""
        return _transition(past, observation, state, _drain_reason(observation.drain) + overdue_note, now)
    if observation.endpoint is None:
        return _transition(past, observation, State.JOINING, observation.resolve_error, now)
    return _by_health(past, observation, policy, now)


def _removing(
    past: NodePlan | None, observation: NodeObservation, policy: Policy, now: float
) -> NodePlan | None:
    if past is None or past.state is State.JOINING:
        return None
    # A node that the panic threshold keeps in service is not leaving yet: the grace period starts afterwards.
    is_still_serving = past.eds_health is EdsHealth.HEALTHY and observation.removed_since is None
    since = now if is_still_serving or past.removal_since is None else past.removal_since
    is_finished = not is_still_serving and (
        observation.is_confirmed_empty or now - since >= policy.gone_grace
    )
    if observation.removed_since is not None:
        overdue_note = _overdue_note(observation) if _terminates_sessions(observation) else ""
        planned = _transition(past, observation, State.DRAINING, "removed by an operator" + overdue_note, now)
        return None if is_finished else replace(planned, removal_since=since)
    reason = f"its entry in {_source_name(observation.node)} was deleted"
    if is_finished and observation.drain is None:
        return None
    if is_finished:
        # A restarting node may delete its entry and register again: it must come back drained.
        planned = _transition(
            past, observation, State.GONE, f"{reason}; it will be drained when it comes back", now
        )
        return replace(planned, removal_since=since, eds_health=None)
    return replace(_transition(past, observation, State.GONE, reason, now), removal_since=since)


def _by_health(past: NodePlan | None, observation: NodeObservation, policy: Policy, now: float) -> NodePlan:
    previous_state = past.state if past is not None else State.JOINING
    verdict = evaluate_health(
        observation.health,
        has_status_address=observation.node.status_address is not None,
        recovering=previous_state is State.UNHEALTHY,
        serving=previous_state in _SERVING_STATES,
        policy=policy,
    )
    if past is None or previous_state in (State.JOINING, State.GONE):
        return _admit(past, observation, verdict, now)
    if verdict.kind is VerdictKind.DOWN:
        return _transition(past, observation, State.UNHEALTHY, verdict.reason, now)
    if verdict.kind is VerdictKind.STOPPING:
        if previous_state is State.UNHEALTHY:
            return _transition(past, observation, State.UNHEALTHY, verdict.reason, now)
        return _transition(past, observation, _drain_state(past, observation), verdict.reason, now)
    if verdict.kind is VerdictKind.UNDECIDED and previous_state is not State.ACTIVE:
        # Keep the reason of the last transition: it still explains the state.
        return _transition(past, observation, previous_state, past.reason, now)
    return _by_registration(past, observation, policy, now)


def _admit(
    past: NodePlan | None, observation: NodeObservation, verdict: HealthVerdict, now: float
) -> NodePlan:
    if verdict.kind is VerdictKind.UP and observation.node.registered:
        return _transition(past, observation, State.ACTIVE, IN_SERVICE_REASON, now)
    reason = verdict.reason
    if verdict.kind is VerdictKind.UP:
        reason = "PD has its `info` but no `ttl`, so it may be dead"
    # A published endpoint stays: without it Envoys would never report the sessions on it again.
    is_published = past is not None and past.eds_health is not None and not observation.is_confirmed_empty
    state = State.GONE if is_published else State.JOINING
    return _transition(past, observation, state, f"not in service yet: {reason}", now)


def _by_registration(past: NodePlan, observation: NodeObservation, policy: Policy, now: float) -> NodePlan:
    if observation.node.registered:
        return _transition(past, observation, State.ACTIVE, IN_SERVICE_REASON, now)
    if past.state is State.UNHEALTHY:
        return _transition(
            past, observation, State.UNHEALTHY, "its registration in PD is stale: `ttl` is missing", now
        )
    missing_since = past.unregistered_since if past.unregistered_since is not None else now
    if now - missing_since < policy.registration_grace and past.state is State.ACTIVE:
        reason = (
            f"it passes its checks; its `ttl` in PD is missing, tolerated for {policy.registration_grace:g} s"
        )
        return _transition(past, observation, State.ACTIVE, reason, now)
    reason = f"its `ttl` in PD has been missing for over {policy.registration_grace:g} s"
    return _transition(past, observation, _drain_state(past, observation), reason, now)


def _drain_state(past: NodePlan | None, observation: NodeObservation) -> State:
    """Return DRAINED once the node is confirmed empty, and from then on until a session is reported on it."""
    was_drained = (
        past is not None and past.state is State.DRAINED and past.eds_health is not EdsHealth.HEALTHY
    )
    return (
        State.DRAINED
        if observation.is_confirmed_empty or (was_drained and not observation.has_sessions)
        else State.DRAINING
    )


def _drain_reason(drain: DrainIntent) -> str:
    return f"drained by the rollout {drain.owner}" if drain.owner else "drained by an operator"


def _overdue_note(observation: NodeObservation) -> str:
    """Return the suffix of the reason if the drain deadline has passed while sessions may remain."""
    if not observation.is_overdue:
        return ""
    if _terminates_sessions(observation):
        return "; the deadline has passed, and the remaining sessions are terminated"
    return "; the deadline has passed, and it still has sessions"


def _terminates_sessions(observation: NodeObservation) -> bool:
    drain = observation.drain
    return observation.is_overdue and drain is not None and drain.on_deadline is OnDeadline.CLOSE


_EDS_HEALTH = {
    State.JOINING: None,
    State.ACTIVE: EdsHealth.HEALTHY,
    State.UNHEALTHY: EdsHealth.UNHEALTHY,
    State.DRAINING: EdsHealth.DRAINING,
    State.DRAINED: EdsHealth.DRAINING,
    State.GONE: EdsHealth.DRAINING,
}


def _transition(
    past: NodePlan | None, observation: NodeObservation, state: State, reason: str, now: float
) -> NodePlan:
    eds_health = _EDS_HEALTH[state]
    is_same_state = past is not None and past.state is state
    active_since = unregistered_since = closed_since = None
    if state is State.ACTIVE:
        active_since = past.active_since if is_same_state and past is not None else now
    if not observation.node.registered:
        unregistered_since = past.unregistered_since if past is not None else None
        unregistered_since = now if unregistered_since is None else unregistered_since
    if state not in (State.JOINING, State.ACTIVE):
        closed_since = past.closed_since if past is not None and past.closed_since is not None else now
    return NodePlan(
        node=observation.node,
        state=state,
        reason=reason,
        since=past.since if is_same_state and past is not None else now,
        eds_health=eds_health,
        weight=past.weight if past is not None and eds_health is EdsHealth.HEALTHY else 0,
        endpoint=observation.endpoint,
        active_since=active_since,
        unregistered_since=unregistered_since,
        closed_since=closed_since,
        version=observation.version,
        terminate_sessions=state in (State.DRAINING, State.GONE) and _terminates_sessions(observation),
    )


def _source_name(node: Node) -> str:
    return {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the list of added nodes"}[
        node.source
    ]
