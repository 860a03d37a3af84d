"""The state machine of one node: computes its next state, EDS health and reason. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, OnDeadline
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Policy

IN_SERVICE_REASON = "it passes its checks"

_SERVING_STATES = (State.ACTIVE, State.DRAINING, State.DRAINED)


class NodeObservation(NamedTuple):
    """The current facts and intents about one node.

    It is a tuple because thousands are created per second, and creating a frozen dataclass takes five times
    as long.
    """

    node: Node
    is_listed: bool  # a source lists the node, or its source has not delivered a complete list yet
    removed_since: float | None  # when an operator removed the node; None: not removed
    drain: DrainIntent | None
    health: Health
    endpoint: str | None  # resolved SQL address; None: the host name has never been resolved
    resolve_error: str  # why there is no endpoint; empty if there is one
    is_confirmed_empty: bool  # every Envoy has confirmed that it has no session on the node
    has_sessions: bool  # an Envoy reports a session on the node
    version: str = ""  # TiDB release; empty if unknown
    is_overdue: bool = False  # the deadline of the drain has passed
    missing_envoys: tuple[str, ...] = ()  # disconnected Envoys that may have sessions on the node


def advance(
    past: NodePlan | None, observation: NodeObservation, policy: Policy, now: float
) -> NodePlan | None:
    """Return the next plan of a node, with unchanged weight, or None if the node leaves the plan.

    The first of these that applies decides: an operator removed the node, no source lists it, it is drained,
    it has no endpoint, the results of its checks, its registration.
    """
    node = _NodeStep(past, observation, policy, now)
    if observation.removed_since is not None or not observation.is_listed:
        return node.remove()
    if observation.drain is not None:
        owner = observation.drain.owner
        reason = f"drained by the rollout {owner}" if owner else "drained by an operator"
        state = node.drain_state()
        return node.enter(state, reason + (node.drain_note() if state is State.DRAINING else ""))
    if observation.endpoint is None:
        return node.enter(State.JOINING, observation.resolve_error)
    return node.advance_by_health()


_SHOWN_ENVOYS = 3
_EDS_HEALTH = {
    State.JOINING: None,
    State.ACTIVE: EdsHealth.HEALTHY,
    State.UNHEALTHY: EdsHealth.UNHEALTHY,
    State.DRAINING: EdsHealth.DRAINING,
    State.DRAINED: EdsHealth.DRAINING,
    State.GONE: EdsHealth.DRAINING,
}
_SOURCE_NAMES = {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the list of added nodes"}


class _NodeStep(NamedTuple):
    """Computes the next plan of one node from its previous plan and the current observation."""

    past: NodePlan | None
    observation: NodeObservation
    policy: Policy
    now: float

    def enter(self, state: State, reason: str) -> NodePlan:
        """Return the plan of the node in this state. The node may already be in this state."""
        past, observation, now = self.past, self.observation, self.now
        past_in_same_state = past if past is not None and past.state is state else None
        active_since = unregistered_since = closed_since = None
        if state is State.ACTIVE:
            active_since = past_in_same_state.active_since if past_in_same_state is not None else now
        if not observation.node.registered:
            unregistered_since = past.unregistered_since if past is not None else None
            unregistered_since = now if unregistered_since is None else unregistered_since
        if state not in (State.JOINING, State.ACTIVE):
            closed_since = past.closed_since if past is not None and past.closed_since is not None else now
        return NodePlan(
            node=observation.node,
            state=state,
            reason=reason,
            since=past_in_same_state.since if past_in_same_state is not None else now,
            eds_health=_EDS_HEALTH[state],
            weight=past.weight if past is not None and state is State.ACTIVE else 0,
            endpoint=observation.endpoint,
            active_since=active_since,
            unregistered_since=unregistered_since,
            closed_since=closed_since,
            version=observation.version,
            terminate_sessions=state in (State.DRAINING, State.GONE) and self.terminates_sessions(),
        )

    def remove(self) -> NodePlan | None:
        """Advance a node that an operator removed, or that no source lists any more."""
        past, observation, now = self.past, self.observation, self.now
        if past is None or past.state is State.JOINING:
            return None
        # While the panic threshold keeps the node in service, the grace period does not start.
        is_still_serving = past.eds_health is EdsHealth.HEALTHY and observation.removed_since is None
        since = now if is_still_serving or past.removal_since is None else past.removal_since
        is_finished = not is_still_serving and (
            observation.is_confirmed_empty or now - since >= self.policy.gone_grace
        )
        if observation.removed_since is not None:
            overdue_note = self.overdue_note() if self.terminates_sessions() else ""
            planned = self.enter(State.DRAINING, "removed by an operator" + overdue_note)
            return None if is_finished else replace(planned, removal_since=since)
        reason = f"its entry in {_SOURCE_NAMES[observation.node.source]} was deleted"
        if not is_finished:
            return replace(self.enter(State.GONE, reason), removal_since=since)
        if observation.drain is None:
            return None
        # A restarting node deletes its entry and registers again. Its drain must continue then.
        planned = self.enter(State.GONE, f"{reason}; it will be drained when it comes back")
        return replace(planned, removal_since=since, eds_health=None)

    def advance_by_health(self) -> NodePlan:
        """Advance a listed node without a drain, by its checks and its registration."""
        past = self.past
        previous_state = past.state if past is not None else State.JOINING
        verdict = evaluate_health(
            self.observation.health,
            has_status_address=self.observation.node.status_address is not None,
            recovering=previous_state is State.UNHEALTHY,
            serving=previous_state in _SERVING_STATES,
            policy=self.policy,
        )
        if past is None or previous_state in (State.JOINING, State.GONE):
            return self._admit(verdict)
        if verdict.kind is VerdictKind.DOWN:
            return self.enter(State.UNHEALTHY, verdict.reason)
        if verdict.kind is VerdictKind.STOPPING:
            is_unhealthy = previous_state is State.UNHEALTHY
            return self.enter(State.UNHEALTHY if is_unhealthy else self.drain_state(), verdict.reason)
        if verdict.kind is VerdictKind.UNDECIDED and previous_state is not State.ACTIVE:
            # Keep the reason of the last transition: it still explains the state.
            return self.enter(previous_state, past.reason)
        return self._advance_by_registration(past)

    def _admit(self, verdict: HealthVerdict) -> NodePlan:
        past, observation = self.past, self.observation
        reason = verdict.reason
        if verdict.kind is VerdictKind.UP:
            if observation.node.registered:
                return self.enter(State.ACTIVE, IN_SERVICE_REASON)
            reason = "PD has its `info` but no `ttl`, so it may be dead"
        # A published endpoint stays published, because Envoys report no sessions on removed endpoints.
        is_published = past is not None and past.eds_health is not None and not observation.is_confirmed_empty
        return self.enter(State.GONE if is_published else State.JOINING, f"not in service yet: {reason}")

    def _advance_by_registration(self, past: NodePlan) -> NodePlan:
        if self.observation.node.registered:
            return self.enter(State.ACTIVE, IN_SERVICE_REASON)
        if past.state is State.UNHEALTHY:
            return self.enter(State.UNHEALTHY, "its registration in PD is stale: `ttl` is missing")
        missing_since = past.unregistered_since if past.unregistered_since is not None else self.now
        grace = self.policy.registration_grace
        if self.now - missing_since < grace and past.state is State.ACTIVE:
            reason = f"{IN_SERVICE_REASON}; its `ttl` in PD is missing, tolerated for {grace:g} s"
            return self.enter(State.ACTIVE, reason)
        return self.enter(self.drain_state(), f"its `ttl` in PD has been missing for over {grace:g} s")

    def drain_state(self) -> State:
        """Return DRAINED once the node is confirmed empty, until a session is reported; else DRAINING."""
        past, observation = self.past, self.observation
        was_drained = (
            past is not None and past.state is State.DRAINED and past.eds_health is not EdsHealth.HEALTHY
        )
        is_drained = observation.is_confirmed_empty or (was_drained and not observation.has_sessions)
        return State.DRAINED if is_drained else State.DRAINING

    def drain_note(self) -> str:
        """Return the suffix of the reason of a drain: why it takes so long."""
        return self._missing_note() + self.overdue_note()

    def overdue_note(self) -> str:
        """Return the suffix of the reason if the drain deadline has passed while sessions may remain."""
        if not self.observation.is_overdue:
            return ""
        if self.terminates_sessions():
            return "; the deadline has passed, and the remaining sessions are terminated"
        has_sessions = self.observation.has_sessions or not self.observation.missing_envoys
        return "; the deadline has passed" + (", and it still has sessions" if has_sessions else "")

    def _missing_note(self) -> str:
        envoys = self.observation.missing_envoys
        if not envoys or self.observation.has_sessions:
            return ""
        names = ", ".join(envoys[:_SHOWN_ENVOYS]) + (" ..." if len(envoys) > _SHOWN_ENVOYS else "")
        return f"; it waits for Envoys that are disconnected and may have sessions on it: {names}"

    def terminates_sessions(self) -> bool:
        """Return whether the drain deadline has passed and the drain then terminates the sessions."""
        drain = self.observation.drain
        return self.observation.is_overdue and drain is not None and drain.on_deadline is OnDeadline.CLOSE


class VerdictKind(Enum):
    """The combined result of the checks of a node."""

    UP = "up"
    DOWN = "down"
    STOPPING = "stopping"  # the node still serves, but says that it is starting up or shutting down
    UNDECIDED = "undecided"  # too few results to change the state


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The verdict on a node. `reason` comes from the check that decided; it is empty if the node is up."""

    kind: VerdictKind
    reason: str = ""


def evaluate_health(
    health: Health, *, has_status_address: bool, recovering: bool, serving: bool, policy: Policy
) -> HealthVerdict:
    """Evaluate the check results of a node.

    A check passes after `rise` consecutive passes if the node is `recovering`, else after one. It fails after
    `fall` consecutive failures if the node is `serving`, else after one. A node that responds "starting up or
    shutting down" is STOPPING unless its SQL check fails: it must get no new sessions, because TiDB sets its
    status to HTTP 500 before it closes its listener (pingcap/tidb pkg/server/server.go).
    """
    sql = status = statement = _UP
    if policy.sql_check:
        sql = _evaluate_check(health.sql, policy.sql_rise, policy.sql_fall, recovering, serving)
    if sql.kind is VerdictKind.DOWN:
        return sql
    if policy.status_check and has_status_address:
        status = _evaluate_check(health.status, policy.status_rise, policy.status_fall, recovering, serving)
    if status.kind in (VerdictKind.DOWN, VerdictKind.STOPPING):
        return status
    if policy.statement_check:
        rise, fall = policy.statement_rise, policy.statement_fall
        statement = _evaluate_check(health.statement, rise, fall, recovering, serving)
    if statement.kind is VerdictKind.DOWN:
        return statement
    return next((check for check in (sql, status) if check.kind is VerdictKind.UNDECIDED), statement)


_UP = HealthVerdict(VerdictKind.UP)


def _evaluate_check(
    probe: CheckResult | None, rise: int, fall: int, recovering: bool, serving: bool
) -> HealthVerdict:
    if probe is None:
        return HealthVerdict(VerdictKind.UNDECIDED, "it has not been checked yet")
    if probe.status is CheckStatus.STOPPING:
        return HealthVerdict(VerdictKind.STOPPING, probe.reason)
    if probe.status is CheckStatus.FAIL:
        is_down = probe.consecutive >= (fall if serving else 1)
        return HealthVerdict(VerdictKind.DOWN if is_down else VerdictKind.UNDECIDED, probe.reason)
    if probe.status is not CheckStatus.PASS:
        # The check could not run: a wrong password must not keep nodes out of service. So the other checks
        # decide, as if this check were off. But a node that has failed does not return while its password is
        # being changed.
        if probe.status is CheckStatus.MISCONFIGURED and recovering and probe.consecutive < fall:
            return HealthVerdict(VerdictKind.UNDECIDED, probe.reason)
        return _UP
    if probe.consecutive >= (rise if recovering else 1):
        return _UP
    return HealthVerdict(VerdictKind.UNDECIDED, "it passes its checks again, but not for long enough yet")
