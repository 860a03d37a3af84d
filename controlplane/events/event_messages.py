"""Changes told as sentences: what the log, the events and the console say of the same thing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from controlplane.model.health import Health
from controlplane.model.intents import Intents, OnDeadline
from controlplane.model.nodes import EMPTY_MAP, Source, State, Topology
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan
from controlplane.model.traffic import ConfigRejection
from controlplane.model.views import DrainProgress, ReloadResult

_FACTOR_NAMES = {"health": "its health", "memory": "its memory", "cpu": "its CPU"}
_SOURCE_NAMES = {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the nodes added by hand"}

# Kinds that a person should see even where only warnings are logged.
_WARNING_KINDS = frozenset(
    {
        "balance.floor",
        "config.rejected",
        "envoy.duplicate",
        "envoy.filter_fallback",
        "envoy.module_refusal",
        "envoy.nack",
        "envoy.problem",
        "envoy.refused",
        "node.hindrance",
        "rollout.not_recorded",
        "rollout.paused",
        "rollout.step_failed",
        "replica.unheard",
        "replica.alone",
        "replica.duplicate",
        "replica.outage",
        "source.outage",
        "source.problem",
        "state.damaged",
        "vitals.outage",
        "xds.certificates_rejected",
    }
)


class EventDraft(NamedTuple):
    """Something to be told: what kind of thing, of whom or what, in words, and in data for programs."""

    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = EMPTY_MAP


def is_warning(kind: str) -> bool:
    """Whether an event of this kind is logged as a warning."""
    return kind in _WARNING_KINDS


def node_events(before: Plan, after: Plan) -> Iterator[EventDraft]:
    """What became of the nodes from one plan to the next."""
    for address, planned in after.nodes.items():
        past = before.nodes.get(address)
        if past is None:
            yield EventDraft(
                "node.discovered", address, f"{address} is known from {_SOURCE_NAMES[planned.node.source]}"
            )
        if past is None or past.state is not planned.state:
            yield _state_event(address, past, planned)
        elif planned.state is State.DRAINING and past.reason != planned.reason:
            yield EventDraft("node.reason", address, f"{address} is {planned.state}: {planned.reason}")
        if past is not None and past.endpoint and planned.endpoint and past.endpoint != planned.endpoint:
            yield EventDraft(
                "node.moved",
                address,
                f"{address} resolves to {planned.endpoint} now, before to {past.endpoint}",
            )
        in_service = planned.eds_health is EdsHealth.HEALTHY
        if past is not None and in_service and past.factors is not planned.factors:
            yield from _factor_events(address, past.factors, planned.factors)
    for address in sorted(before.nodes.keys() - after.nodes.keys()):
        yield EventDraft(
            "node.forgotten", address, f"{address} is forgotten: it left, and no session is waited for"
        )
    if after.panic_threshold_reason and not before.panic_threshold_reason:
        yield EventDraft("balance.floor", "nodes", after.panic_threshold_reason)
    if before.panic_threshold_reason and not after.panic_threshold_reason:
        yield EventDraft(
            "balance.floor_over", "nodes", "enough nodes pass their checks again; checks are trusted again"
        )


def _state_event(address: str, past: NodePlan | None, planned: NodePlan) -> EventDraft:
    before = past.state.value if past is not None else None
    data = {"from": before, "to": planned.state.value, "reason": planned.reason}
    return EventDraft("node.state", address, f"{address} is {planned.state}: {planned.reason}", data)


def _factor_events(
    address: str, before: Mapping[str, Factor], after: Mapping[str, Factor]
) -> Iterator[EventDraft]:
    """Vital signs that have become better or worse."""
    for name in sorted(before.keys() | after.keys()):
        past, now = before.get(name), after.get(name)
        previous_level, level = past.level if past else 0, now.level if now else 0
        if previous_level == level:
            continue
        data = {"factor": name, "from": previous_level, "to": level}
        if now is None or not level:
            why = f": it is {now.reason}" if now is not None and now.reason else ""
            message = f"{address}: {_FACTOR_NAMES[name]} is no reason any more to give it fewer sessions{why}"
        else:
            target = f"its share of the sessions goes to {now.target:.0%}"
            message = f"{address}: {now.reason}" + (f"; {target}" if now.target < 1 else "")
            data["target"] = now.target
        yield EventDraft("node.factor", address, message, data)


def rebalance_events(before: Plan, after: Plan) -> Iterator[EventDraft]:
    """When many sessions begin to move for nodes' shares, and when that is over."""
    past, now = before.rebalance, after.rebalance
    if past.since is None and now.since is not None:
        outgoing = {address: sum(moves.values()) for address, moves in now.outgoing.items()}
        message = f"sessions are asked to move, so that each node has its share: {now.reason}"
        yield EventDraft("balance.rebalance", "nodes", message, {"asked": outgoing})
    if past.since is not None and now.since is None:
        yield EventDraft(
            "balance.rebalance_over", "nodes", f"no more sessions are asked to move: {now.reason}"
        )


def intent_events(before: Intents, after: Intents) -> Iterator[EventDraft]:
    """What operators asked for, from one set of intents to the next."""
    for address, drain in after.drains.items():
        if before.drains.get(address) != drain:
            ended = "are ended" if drain.on_deadline is OnDeadline.CLOSE else "stay"
            left = f"sessions that are left after {drain.deadline_seconds:g} s {ended}"
            who = f"the rollout {drain.owner}" if drain.owner else "an operator"
            yield EventDraft("intent.drain", address, f"{who} drains {address}; {left}")
    for address, since in after.removed.items():
        if before.removed.get(address) != since:
            yield EventDraft("intent.remove", address, f"an operator removes {address}")
    for address, weight in after.weights.items():
        if before.weights.get(address) != weight:
            yield EventDraft("intent.weight", address, f"an operator gives {address} the weight {weight}")
    for address, labels in after.labels.items():
        if before.labels.get(address) != labels:
            shown = ", ".join(f"{name}={value}" for name, value in labels.items()) or "no labels"
            yield EventDraft("intent.labels", address, f"an operator gives {address} {shown}")
    for address, node in after.added.items():
        if before.added.get(address) != node:
            yield EventDraft("intent.add", address, f"an operator adds {address}")
    for envoy, at in after.ended_envoys.items():
        if before.ended_envoys.get(envoy) != at:
            yield EventDraft("intent.envoy_ended", envoy, f"an operator says that {envoy} has ended for good")
    # What was added by hand and is no more has left: its removal is finished.
    for address in before.removed.keys() - after.removed.keys() - after.added.keys() - before.added.keys():
        yield EventDraft("intent.readmit", address, f"an operator takes the removal of {address} back")
    for address in before.drains.keys() - after.drains.keys():
        yield EventDraft("intent.undrain", address, f"the drain of {address} is over")


def topology_events(before: Topology | None, after: Topology) -> Iterator[EventDraft]:
    """What changed in a source besides its nodes."""
    name = _SOURCE_NAMES[after.source]
    outage = before.outage if before is not None else ""
    if after.outage and after.outage != outage:
        yield EventDraft("source.outage", after.source.value, after.outage)
    if outage and not after.outage:
        yield EventDraft("source.recovered", after.source.value, f"{name} answers again")
    known = set(before.problems) if before is not None else set()
    for problem in after.problems:
        if problem not in known:
            yield EventDraft(
                "source.problem",
                problem.subject,
                f"{problem.subject} in {name} is left out: {problem.reason}",
            )
    known_other_keyspace = before.other_keyspace if before is not None else {}
    for address, keyspace in after.other_keyspace.items():
        if known_other_keyspace.get(address) != keyspace:
            yield EventDraft(
                "node.foreign", address, f"{address} serves keyspace {keyspace}, so nothing is sent to it"
            )


def node_metrics_events(before: str, after: str) -> Iterator[EventDraft]:
    """When the nodes' vital signs cannot be read any more, and when they can again."""
    if after and not before:
        yield EventDraft("vitals.outage", "nodes", after)
    if before and not after:
        yield EventDraft(
            "vitals.outage_over", "nodes", "nothing hinders reading CPU, memory and health any more"
        )


def migration_blocker_events(address: str, before: Health, after: Health) -> Iterator[EventDraft]:
    """What a node lacks for its sessions to move, and did not lack before."""
    for blocker in after.migration_blockers:
        if blocker not in before.migration_blockers:
            yield EventDraft("node.hindrance", address, f"{address}: {blocker}")


def drain_finished(address: str, progress: DrainProgress) -> EventDraft:
    """What came of the sessions of a node that is not being left any more, or has been left by all."""
    failed = sum(progress.failed.values())
    parts = [f"{progress.moved} sessions moved to other nodes in {progress.elapsed_seconds:.0f} s"]
    if failed:
        reasons = ", ".join(f"{why} {count}" for why, count in progress.failed.items())
        parts.append(f"{failed} tries to move one failed ({reasons})")
    if progress.lost:
        parts.append(f"{progress.lost} sessions were lost")
    if progress.sessions_left:
        parts.append(f"{progress.sessions_left} sessions are left")
    data = {
        "seconds": progress.elapsed_seconds,
        "moved": progress.moved,
        "failed": dict(progress.failed),
        "lost": progress.lost,
        "left": progress.sessions_left,
    }
    return EventDraft("node.departure", address, f"{address}: {', '.join(parts)}", data)


def module_config_rejected(envoy: str, rejection: ConfigRejection) -> EventDraft:
    """A configuration that the module in an Envoy would not take."""
    data = {"extension": rejection.extension, "text": rejection.text}
    message = f"its module refused the configuration of `{rejection.extension}`: {rejection.text}"
    return EventDraft("envoy.module_refusal", envoy, message, data)


def reload_message(result: ReloadResult) -> str:
    """What a reload did, in one sentence."""
    parts = []
    if result.applied:
        parts.append(f"in force now: {', '.join(result.applied)}")
    if result.needs_new_envoys:
        parts.append(f"for Envoys that start from now on: {', '.join(result.needs_new_envoys)}")
    if result.needs_restart:
        parts.append(f"only after a restart of the control plane: {', '.join(result.needs_restart)}")
    return "the configuration was read again; " + ("; ".join(parts) if parts else "nothing changed")
