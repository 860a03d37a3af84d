"""Builds events from changes, with messages for the log, the event feed and the console. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from controlplane.model.health import CheckStatus, Health
from controlplane.model.intents import Intents, OnDeadline
from controlplane.model.module_switches import NO_OVERRIDES, SWITCHES, SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP, Source, State, Topology
from controlplane.model.plan import EdsHealth, Factor, Plan
from controlplane.model.rules import StatementRule
from controlplane.model.traffic import ConfigRejection
from controlplane.model.views import DrainProgress, ReloadResult

V = TypeVar("V")

_FACTOR_NAMES = {"health": "its health", "memory": "its memory", "cpu": "its CPU"}
_SOURCE_NAMES = {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the API"}

# Kinds that operators must see even if the log level is "warning".
_WARNING_KINDS = frozenset(
    {
        "api.certificates_rejected",
        "balance.certificates_rejected",
        "balance.panic_threshold",
        "config.rejected",
        "envoy.duplicate",
        "envoy.filter_fallback",
        "envoy.config_rejected",
        "envoy.nack",
        "envoy.problem",
        "envoy.denied",
        "health.certificates_rejected",
        "node.check_misconfigured",
        "node.migration_blocker",
        "rollout.not_recorded",
        "rollout.paused",
        "rollout.step_failed",
        "replica.unreachable",
        "replica.standalone",
        "replica.duplicate",
        "replica.outage",
        "source.outage",
        "source.problem",
        "state.load_failed",
        "node_metrics.outage",
        "xds.certificates_rejected",
        "xds.push_failed",
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event log, as shown by `GET /v1/events`.

    `kind` is a dotted name such as `node.state`; `subject` is a node address, an Envoy id or a key.
    """

    id: int
    at: float
    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = field(default_factory=lambda: EMPTY_MAP)


class EventDraft(NamedTuple):
    """An event without id and time. `message` is for people, `data` for programs."""

    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = EMPTY_MAP


def is_warning(kind: str) -> bool:
    """Return whether events of this kind are logged as warnings."""
    return kind in _WARNING_KINDS


def node_events(before: Plan, after: Plan) -> Iterator[EventDraft]:
    """Yield events for the changes of nodes from one plan to the next."""
    for address, planned in after.nodes.items():
        past = before.nodes.get(address)
        if past is None:
            source = _SOURCE_NAMES[planned.node.source]
            yield EventDraft("node.discovered", address, f"{address} was discovered in {source}")
        if past is None or past.state is not planned.state:
            data = {"from": past and past.state.value, "to": planned.state.value, "reason": planned.reason}
            yield EventDraft("node.state", address, f"{address} is {planned.state}: {planned.reason}", data)
        elif planned.state is State.DRAINING and past.reason != planned.reason:
            yield EventDraft("node.reason", address, f"{address} is {planned.state}: {planned.reason}")
        if past is not None and past.endpoint and planned.endpoint and past.endpoint != planned.endpoint:
            message = f"{address} now resolves to {planned.endpoint} (previously {past.endpoint})"
            yield EventDraft("node.address_changed", address, message)
        in_service = planned.eds_health is EdsHealth.HEALTHY
        if past is not None and in_service and past.factors is not planned.factors:
            yield from _factor_events(address, past.factors, planned.factors)
    for address in sorted(before.nodes.keys() - after.nodes.keys()):
        message = f"{address} is no longer tracked: it was removed and has no sessions"
        yield EventDraft("node.forgotten", address, message)
    if after.panic_threshold_reason and not before.panic_threshold_reason:
        yield EventDraft("balance.panic_threshold", "nodes", after.panic_threshold_reason)
    if before.panic_threshold_reason and not after.panic_threshold_reason:
        message = "enough nodes pass their checks again; failed checks take nodes out of service again"
        yield EventDraft("balance.panic_threshold_over", "nodes", message)


def _factor_events(
    address: str, before: Mapping[str, Factor], after: Mapping[str, Factor]
) -> Iterator[EventDraft]:
    """Yield an event for each factor with a changed level."""
    for name in sorted(before.keys() | after.keys()):
        past, now = before.get(name), after.get(name)
        previous_level, level = past.level if past else 0, now.level if now else 0
        if previous_level == level:
            continue
        data = {"factor": name, "from": previous_level, "to": level}
        if now is None or not level:
            reason = f": it is {now.reason}" if now is not None and now.reason else ""
            message = f"{address}: {_FACTOR_NAMES[name]} no longer reduces its share of the sessions{reason}"
        else:
            target = f"its share of the sessions changes to {now.target:.0%}"
            message = f"{address}: {now.reason}" + (f"; {target}" if now.target < 1 else "")
            data["target"] = now.target
        yield EventDraft("node.factor", address, message, data)


def rebalance_events(before: Plan, after: Plan) -> Iterator[EventDraft]:
    """Yield an event when a rebalance starts or ends."""
    past, now = before.rebalance, after.rebalance
    if past.since is None and now.since is not None:
        outgoing = {address: sum(by_envoy.values()) for address, by_envoy in now.outgoing.items()}
        target = "nodes with fewer sessions than their share"
        message = f"rebalancing started: sessions migrate to {target}: {now.reason}"
        yield EventDraft("balance.rebalance", "nodes", message, {"asked": outgoing})
    if past.since is not None and now.since is None:
        yield EventDraft("balance.rebalance_over", "nodes", f"rebalancing ended: {now.reason}")


def capture_events(before: Plan, after: Plan, now: float) -> Iterator[EventDraft]:
    """Yield events when a capture of the traffic of clients starts or ends."""
    past, current = before.capture, after.capture
    if past == current:
        return
    if past is not None:
        reason = "its time is over" if now >= past.until else "it was stopped"
        yield EventDraft("capture.ended", past.name, f"the capture {past.name} has ended: {reason}")
    if current is not None:
        filters = {"envoys": current.envoys, "users": current.users, "groups": current.groups}
        limits = "; ".join(f"{name} {', '.join(values)}" for name, values in filters.items() if values)
        minutes = f"{(current.until - current.started_at) / 60:g} min"
        message = f"the capture {current.name} has started, for {minutes}: {limits or 'all traffic'}"
        data = {"until": current.until, **{name: list(values) for name, values in filters.items()}}
        yield EventDraft("capture.started", current.name, message, data)


def intent_events(before: Intents, after: Intents) -> Iterator[EventDraft]:
    """Yield events for the intents that were added, changed or withdrawn."""
    for address, drain in _changed(before.drains, after.drains):
        action = "are closed" if drain.on_deadline is OnDeadline.CLOSE else "stay"
        deadline = f"sessions that remain after {drain.deadline_seconds:g} s {action}"
        owner = f"the rollout {drain.owner}" if drain.owner else "an operator"
        yield EventDraft("intent.drain", address, f"{owner} drains {address}; {deadline}")
    for address, _ in _changed(before.removed, after.removed):
        yield EventDraft("intent.remove", address, f"an operator removes {address}")
    for address, weight in _changed(before.weights, after.weights):
        message = f"an operator sets the weight of {address} to {weight}"
        yield EventDraft("intent.weight", address, message)
    for address, labels in _changed(before.labels, after.labels):
        label_text = ", ".join(f"{name}={value}" for name, value in labels.items()) or "none"
        message = f"an operator sets the labels of {address}: {label_text}"
        yield EventDraft("intent.labels", address, message)
    for address, _ in _changed(before.added, after.added):
        yield EventDraft("intent.add", address, f"an operator adds {address}")
    for envoy, _ in _changed(before.ended_envoys, after.ended_envoys):
        message = f"{envoy} was reported as permanently stopped"
        yield EventDraft("intent.envoy_ended", envoy, message)
    for envoy in sorted(before.switch_overrides.keys() | after.switch_overrides.keys()):
        past, now = (i.switch_overrides.get(envoy, NO_OVERRIDES) for i in (before, after))
        if past.ready != now.ready:
            state = "ready" if now.is_ready else "not ready"
            message = f"an operator sets {envoy} to {state} for new clients"
            yield EventDraft("intent.envoy_ready", envoy, message, {"ready": now.is_ready})
        if past.drain != now.drain:
            message = f"an operator {'drains' if now.is_drain_requested else 'ends the drain of'} {envoy}"
            yield EventDraft("intent.envoy_drain", envoy, message, {"drain": now.is_drain_requested})
        if replace(past, ready=now.ready, drain=now.drain) != now:
            yield _switches_event(envoy, past, now)
    if before.rules != after.rules:
        yield _rules_event(before.rules, after.rules)
    # A removal also ends when a node that operators added has left the plan, or when they add it again.
    for address in before.removed.keys() - after.removed.keys() - after.added.keys() - before.added.keys():
        yield EventDraft("intent.restore", address, f"an operator cancels the removal of {address}")
    for address in before.drains.keys() - after.drains.keys():
        yield EventDraft("intent.undrain", address, f"the drain of {address} has ended")


def _switches_event(envoy: str, before: SwitchOverrides, after: SwitchOverrides) -> EventDraft:
    """Return the event for switches of the module that an operator has set for one Envoy."""
    changes = {
        part: getattr(after, part) for part in SWITCHES if getattr(before, part) != getattr(after, part)
    }
    texts = {True: "is switched on", False: "is switched off", None: "follows the settings"}
    message = f"{envoy}: {', '.join(f'{part} {texts[value]}' for part, value in changes.items())}"
    data = {part: None if value is None else "on" if value else "off" for part, value in changes.items()}
    return EventDraft("intent.envoy_switches", envoy, message, data)


def _rules_event(before: Sequence[StatementRule], after: Sequence[StatementRule]) -> EventDraft:
    """Return the event for a change of the rules for statements."""
    past, now = ({rule.name: rule for rule in rules} for rules in (before, after))
    changes = {
        "added": [name for name in now if name not in past],
        "changed": [name for name in now if name in past and past[name] != now[name]],
        "removed": [name for name in past if name not in now],
    }
    texts = [f"{verb} {', '.join(names)}" for verb, names in changes.items() if names]
    message = f"an operator sets the rules for statements: {'; '.join(texts) or 'another order'}"
    return EventDraft("intent.rules", "rules", message, changes)


def _changed(before: Mapping[str, V], after: Mapping[str, V]) -> list[tuple[str, V]]:
    return [(key, value) for key, value in after.items() if before.get(key) != value]


def topology_events(before: Topology | None, after: Topology) -> Iterator[EventDraft]:
    """Yield events for outages, problems and nodes of other keyspaces of a source."""
    name = _SOURCE_NAMES[after.source]
    outage = before.outage if before is not None else ""
    if after.outage and after.outage != outage:
        yield EventDraft("source.outage", after.source.value, after.outage)
    if outage and not after.outage:
        yield EventDraft("source.recovered", after.source.value, f"{name} answers again")
    known_problems = set(before.problems) if before is not None else set()
    for problem in after.problems:
        if problem not in known_problems:
            message = f"{problem.subject} in {name} is ignored: {problem.reason}"
            yield EventDraft("source.problem", problem.subject, message)
    for address, keyspace in _changed(before.other_keyspace if before else {}, after.other_keyspace):
        message = f"{address} serves keyspace {keyspace}, so it gets no sessions"
        yield EventDraft("node.other_keyspace", address, message)


def node_metrics_events(before: str, after: str) -> Iterator[EventDraft]:
    """Yield an event when node metrics become unavailable or available again.

    `before` and `after` say why node metrics are unavailable; an empty text means that they are available.
    """
    if after and not before:
        yield EventDraft("node_metrics.outage", "nodes", after)
    if before and not after:
        yield EventDraft("node_metrics.outage_over", "nodes", "node metrics are available again")


def migration_blocker_events(address: str, before: Health, after: Health) -> Iterator[EventDraft]:
    """Yield events for new reasons why the sessions of a node cannot migrate, or cannot migrate in time."""
    for blocker in after.migration_blockers:
        if blocker not in before.migration_blockers:
            yield EventDraft("node.migration_blocker", address, f"{address}: {blocker}")


def check_problem_events(address: str, before: Health, after: Health) -> Iterator[EventDraft]:
    """Yield an event if the settings or the user of the statement check now prevent it."""
    past, now = before.statement, after.statement
    if now is None or now.status is not CheckStatus.MISCONFIGURED:
        return
    if past is None or (past.status, past.reason) != (now.status, now.reason):
        yield EventDraft("node.check_misconfigured", address, f"{address} is not checked: {now.reason}")


def drain_finished(address: str, progress: DrainProgress) -> EventDraft:
    """Return the event for the end of a drain: no session remains, or the drain was cancelled."""
    failed = sum(progress.failed.values())
    sessions = "session" if progress.migrated == 1 else "sessions"
    parts = [f"{progress.migrated} {sessions} migrated to other nodes in {progress.elapsed_seconds:.0f} s"]
    if failed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in progress.failed.items())
        parts.append(f"{failed} migration attempts failed ({reasons})")
    if progress.lost:
        parts.append(f"{progress.lost} sessions were lost")
    if progress.sessions_left:
        parts.append(f"{progress.sessions_left} sessions remain")
    data = {
        "seconds": progress.elapsed_seconds,
        "migrated": progress.migrated,
        "failed": dict(progress.failed),
        "lost": progress.lost,
        "left": progress.sessions_left,
    }
    return EventDraft("node.drain_finished", address, f"{address}: {', '.join(parts)}", data)


def module_config_rejected(envoy: str, rejection: ConfigRejection) -> EventDraft:
    """Return the event for a configuration that the module in an Envoy rejected."""
    data = {"extension": rejection.extension, "text": rejection.text}
    message = f"its module rejected the configuration of `{rejection.extension}`: {rejection.text}"
    return EventDraft("envoy.config_rejected", envoy, message, data)


def reload_message(result: ReloadResult) -> str:
    """Return one sentence that says when each changed setting takes effect."""
    parts = []
    if result.applied:
        parts.append(f"applied now: {', '.join(result.applied)}")
    if result.applied_by_module:
        parts.append(f"applied by Envoys with the module: {', '.join(result.applied_by_module)}")
    if result.needs_new_envoys:
        parts.append(f"applies to Envoys that start from now on: {', '.join(result.needs_new_envoys)}")
    if result.needs_restart:
        parts.append(f"applies after a restart of the control plane: {', '.join(result.needs_restart)}")
    return "the configuration was reloaded; " + ("; ".join(parts) if parts else "nothing changed")
