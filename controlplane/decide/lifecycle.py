"""One node's life: from what is known of it to its next state, what Envoys are told, and why. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from controlplane.decide.health_verdict import Judgement, Verdict, judge
from controlplane.model.health import Health
from controlplane.model.intents import Drain, OnDeadline
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import Advice, NodePlan, Policy

IN_SERVICE = "it passes its checks"

_SERVING = (State.ACTIVE, State.DRAINING, State.DRAINED)


class Evidence(NamedTuple):
    """All that the decision on one node depends on, beside its past.

    A tuple, because thousands are made a second and a frozen dataclass costs five times as much to make.
    """

    node: Node
    listed: bool  # some source names it, or the source that did is silent
    removed_since: float | None  # an operator removed it
    drain: Drain | None
    health: Health
    endpoint: str | None  # where its name leads; None when the name has never resolved
    unresolved: str  # why not; empty when it does
    empty: bool  # surely no session is left
    occupied: bool  # a session is known to be there
    version: str = ""  # release of its TiDB; empty: not known
    overdue: bool = False  # the deadline of its drain has passed


def advance(past: NodePlan | None, evidence: Evidence, policy: Policy, now: float) -> NodePlan | None:
    """The next plan for a node, its weight as it was; None when the node is forgotten.

    The rules in the order in which they win: an operator removed it; its `info` is gone; an operator drains
    it; it has no endpoint; its checks; its registration.
    """
    if evidence.removed_since is not None or not evidence.listed:
        return _leave(past, evidence, policy, now)
    if evidence.drain is not None:
        state = _emptying(past, evidence)
        late = _late(evidence) if state is State.DRAINING else ""
        return _enter(past, evidence, state, _drained(evidence.drain) + late, now)
    if evidence.endpoint is None:
        return _enter(past, evidence, State.JOINING, evidence.unresolved, now)
    return _judged(past, evidence, policy, now)


def _leave(past: NodePlan | None, evidence: Evidence, policy: Policy, now: float) -> NodePlan | None:
    if past is None or past.state is State.JOINING:
        return None
    # What still serves, if only because the floor keeps it, does not leave: the grace begins after that.
    kept = past.advice is Advice.HEALTHY and evidence.removed_since is None
    since = now if kept or past.leaving_since is None else past.leaving_since
    left = not kept and (evidence.empty or now - since >= policy.gone_grace)
    if evidence.removed_since is not None:
        late = _late(evidence) if _closes(evidence) else ""
        planned = _enter(past, evidence, State.DRAINING, "removed by an operator" + late, now)
        return None if left else replace(planned, leaving_since=since)
    reason = f"its entry in {_origin(evidence.node)} was deleted"
    if left and evidence.drain is None:
        return None
    if left:
        # A node that restarts may delete its entry and come back: it must come back drained.
        planned = _enter(past, evidence, State.GONE, f"{reason}; it will be drained when it comes back", now)
        return replace(planned, leaving_since=since, advice=None)
    return replace(_enter(past, evidence, State.GONE, reason, now), leaving_since=since)


def _judged(past: NodePlan | None, evidence: Evidence, policy: Policy, now: float) -> NodePlan:
    was = past.state if past is not None else State.JOINING
    judgement = judge(
        evidence.health,
        has_status=evidence.node.status_address is not None,
        recovering=was is State.UNHEALTHY,
        serving=was in _SERVING,
        policy=policy,
    )
    if past is None or was in (State.JOINING, State.GONE):
        return _join(past, evidence, judgement, now)
    if judgement.verdict is Verdict.DOWN:
        return _enter(past, evidence, State.UNHEALTHY, judgement.reason, now)
    if judgement.verdict is Verdict.STOPPING:
        if was is State.UNHEALTHY:
            return _enter(past, evidence, State.UNHEALTHY, judgement.reason, now)
        return _enter(past, evidence, _emptying(past, evidence), judgement.reason, now)
    if judgement.verdict is Verdict.HOLD and was is not State.ACTIVE:
        # Keep the reason that it came with: it still explains the state.
        return _enter(past, evidence, was, past.reason, now)
    return _registered(past, evidence, policy, now)


def _join(past: NodePlan | None, evidence: Evidence, judgement: Judgement, now: float) -> NodePlan:
    if judgement.verdict is Verdict.UP and evidence.node.registered:
        return _enter(past, evidence, State.ACTIVE, IN_SERVICE, now)
    reason = judgement.reason
    if judgement.verdict is Verdict.UP:
        reason = "PD has its `info` but no `ttl`, so it may be dead"
    # An endpoint that Envoys are told of stays: taken away, they would never report its sessions again.
    told = past is not None and past.advice is not None and not evidence.empty
    state = State.GONE if told else State.JOINING
    return _enter(past, evidence, state, f"not in service yet: {reason}", now)


def _registered(past: NodePlan, evidence: Evidence, policy: Policy, now: float) -> NodePlan:
    if evidence.node.registered:
        return _enter(past, evidence, State.ACTIVE, IN_SERVICE, now)
    if past.state is State.UNHEALTHY:
        return _enter(
            past, evidence, State.UNHEALTHY, "its registration in PD is stale: `ttl` is missing", now
        )
    lost = past.unregistered_since if past.unregistered_since is not None else now
    if now - lost < policy.registration_grace and past.state is State.ACTIVE:
        reason = (
            f"it passes its checks; its `ttl` in PD is missing, borne for {policy.registration_grace:g} s"
        )
        return _enter(past, evidence, State.ACTIVE, reason, now)
    reason = f"its `ttl` in PD has been missing for over {policy.registration_grace:g} s"
    return _enter(past, evidence, _emptying(past, evidence), reason, now)


def _emptying(past: NodePlan | None, evidence: Evidence) -> State:
    """Drained once it is surely empty; from then on until a session shows, for none can have come since."""
    was_drained = past is not None and past.state is State.DRAINED and past.advice is not Advice.HEALTHY
    return State.DRAINED if evidence.empty or (was_drained and not evidence.occupied) else State.DRAINING


def _drained(drain: Drain) -> str:
    return f"drained by the rollout {drain.by}" if drain.by else "drained by an operator"


def _late(evidence: Evidence) -> str:
    """What a reason says of a deadline that has passed while sessions may be left."""
    if not evidence.overdue:
        return ""
    if _closes(evidence):
        return "; the deadline has passed, and the sessions that are left are ended"
    return "; the deadline has passed, and it still has sessions"


def _closes(evidence: Evidence) -> bool:
    drain = evidence.drain
    return evidence.overdue and drain is not None and drain.on_deadline is OnDeadline.CLOSE


_ADVICE = {
    State.JOINING: None,
    State.ACTIVE: Advice.HEALTHY,
    State.UNHEALTHY: Advice.UNHEALTHY,
    State.DRAINING: Advice.DRAINING,
    State.DRAINED: Advice.DRAINING,
    State.GONE: Advice.DRAINING,
}


def _enter(past: NodePlan | None, evidence: Evidence, state: State, reason: str, now: float) -> NodePlan:
    advice = _ADVICE[state]
    same = past is not None and past.state is state
    active_since = unregistered_since = closed_since = None
    if state is State.ACTIVE:
        active_since = past.active_since if same and past is not None else now
    if not evidence.node.registered:
        unregistered_since = past.unregistered_since if past is not None else None
        unregistered_since = now if unregistered_since is None else unregistered_since
    if state not in (State.JOINING, State.ACTIVE):
        closed_since = past.closed_since if past is not None and past.closed_since is not None else now
    return NodePlan(
        node=evidence.node,
        state=state,
        reason=reason,
        since=past.since if same and past is not None else now,
        advice=advice,
        weight=past.weight if past is not None and advice is Advice.HEALTHY else 0,
        endpoint=evidence.endpoint,
        active_since=active_since,
        unregistered_since=unregistered_since,
        closed_since=closed_since,
        version=evidence.version,
        closing=state in (State.DRAINING, State.GONE) and _closes(evidence),
    )


def _origin(node: Node) -> str:
    return {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the list of added nodes"}[
        node.source
    ]
