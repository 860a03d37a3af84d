"""Changes told as sentences: what the log, the events and the console say of the same thing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from controlplane.model.health import Health
from controlplane.model.intents import Intents, OnDeadline
from controlplane.model.nodes import NOTHING, Source, State, Topology
from controlplane.model.plan import Advice, Factor, NodePlan, Plan
from controlplane.model.traffic import Refusal
from controlplane.model.views import Departure, Reloaded

_SIGNS = {"health": "its health", "memory": "its memory", "cpu": "its CPU"}
_NAMES = {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the nodes added by hand"}

# Kinds that a person should see even where only warnings are logged.
_WARNINGS = frozenset(
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


class Told(NamedTuple):
    """Something to be told: what kind of thing, of whom or what, in words, and in data for programs."""

    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = NOTHING


def is_warning(kind: str) -> bool:
    """Whether an event of this kind is logged as a warning."""
    return kind in _WARNINGS


def node_events(before: Plan, after: Plan) -> Iterator[Told]:
    """What became of the nodes from one plan to the next."""
    for address, planned in after.nodes.items():
        past = before.nodes.get(address)
        if past is None:
            yield Told("node.discovered", address, f"{address} is known from {_NAMES[planned.node.source]}")
        if past is None or past.state is not planned.state:
            yield _state(address, past, planned)
        elif planned.state is State.DRAINING and past.reason != planned.reason:
            yield Told("node.reason", address, f"{address} is {planned.state}: {planned.reason}")
        if past is not None and past.endpoint and planned.endpoint and past.endpoint != planned.endpoint:
            yield Told(
                "node.moved",
                address,
                f"{address} resolves to {planned.endpoint} now, before to {past.endpoint}",
            )
        in_service = planned.advice is Advice.HEALTHY
        if past is not None and in_service and past.factors is not planned.factors:
            yield from _factors(address, past.factors, planned.factors)
    for address in sorted(before.nodes.keys() - after.nodes.keys()):
        yield Told(
            "node.forgotten", address, f"{address} is forgotten: it left, and no session is waited for"
        )
    if after.floor and not before.floor:
        yield Told("balance.floor", "nodes", after.floor)
    if before.floor and not after.floor:
        yield Told(
            "balance.floor_over", "nodes", "enough nodes pass their checks again; checks are trusted again"
        )


def _state(address: str, past: NodePlan | None, planned: NodePlan) -> Told:
    before = past.state.value if past is not None else None
    data = {"from": before, "to": planned.state.value, "reason": planned.reason}
    return Told("node.state", address, f"{address} is {planned.state}: {planned.reason}", data)


def _factors(address: str, before: Mapping[str, Factor], after: Mapping[str, Factor]) -> Iterator[Told]:
    """Vital signs that have become better or worse."""
    for name in sorted(before.keys() | after.keys()):
        past, now = before.get(name), after.get(name)
        was, level = past.level if past else 0, now.level if now else 0
        if was == level:
            continue
        data = {"factor": name, "from": was, "to": level}
        if now is None or not level:
            why = f": it is {now.reason}" if now is not None and now.reason else ""
            message = f"{address}: {_SIGNS[name]} is no reason any more to give it fewer sessions{why}"
        else:
            target = f"its share of the sessions goes to {now.target:.0%}"
            message = f"{address}: {now.reason}" + (f"; {target}" if now.target < 1 else "")
            data["target"] = now.target
        yield Told("node.factor", address, message, data)


def rebalance_events(before: Plan, after: Plan) -> Iterator[Told]:
    """When many sessions begin to move for nodes' shares, and when that is over."""
    past, now = before.rebalance, after.rebalance
    if past.since is None and now.since is not None:
        asked = {address: sum(moves.values()) for address, moves in now.moves.items()}
        message = f"sessions are asked to move, so that each node has its share: {now.reason}"
        yield Told("balance.rebalance", "nodes", message, {"asked": asked})
    if past.since is not None and now.since is None:
        yield Told("balance.rebalance_over", "nodes", f"no more sessions are asked to move: {now.reason}")


def intent_events(before: Intents, after: Intents) -> Iterator[Told]:
    """What operators asked for, from one set of intents to the next."""
    for address, drain in after.drains.items():
        if before.drains.get(address) != drain:
            ended = "are ended" if drain.on_deadline is OnDeadline.CLOSE else "stay"
            left = f"sessions that are left after {drain.deadline_seconds:g} s {ended}"
            who = f"the rollout {drain.by}" if drain.by else "an operator"
            yield Told("intent.drain", address, f"{who} drains {address}; {left}")
    for address, since in after.removed.items():
        if before.removed.get(address) != since:
            yield Told("intent.remove", address, f"an operator removes {address}")
    for address, weight in after.weights.items():
        if before.weights.get(address) != weight:
            yield Told("intent.weight", address, f"an operator gives {address} the weight {weight}")
    for address, labels in after.labels.items():
        if before.labels.get(address) != labels:
            shown = ", ".join(f"{name}={value}" for name, value in labels.items()) or "no labels"
            yield Told("intent.labels", address, f"an operator gives {address} {shown}")
    for address, node in after.added.items():
        if before.added.get(address) != node:
            yield Told("intent.add", address, f"an operator adds {address}")
    for envoy, at in after.ended.items():
        if before.ended.get(envoy) != at:
            yield Told("intent.envoy_ended", envoy, f"an operator says that {envoy} has ended for good")
    # What was added by hand and is no more has left: its removal is finished.
    for address in before.removed.keys() - after.removed.keys() - after.added.keys() - before.added.keys():
        yield Told("intent.readmit", address, f"an operator takes the removal of {address} back")
    for address in before.drains.keys() - after.drains.keys():
        yield Told("intent.undrain", address, f"the drain of {address} is over")


def topology_events(before: Topology | None, after: Topology) -> Iterator[Told]:
    """What changed in a source besides its nodes."""
    name = _NAMES[after.source]
    outage = before.outage if before is not None else ""
    if after.outage and after.outage != outage:
        yield Told("source.outage", after.source.value, after.outage)
    if outage and not after.outage:
        yield Told("source.recovered", after.source.value, f"{name} answers again")
    known = set(before.problems) if before is not None else set()
    for problem in after.problems:
        if problem not in known:
            yield Told(
                "source.problem",
                problem.subject,
                f"{problem.subject} in {name} is left out: {problem.reason}",
            )
    strangers = before.foreign if before is not None else {}
    for address, keyspace in after.foreign.items():
        if strangers.get(address) != keyspace:
            yield Told(
                "node.foreign", address, f"{address} serves keyspace {keyspace}, so nothing is sent to it"
            )


def vitals_events(before: str, after: str) -> Iterator[Told]:
    """When the nodes' vital signs cannot be read any more, and when they can again."""
    if after and not before:
        yield Told("vitals.outage", "nodes", after)
    if before and not after:
        yield Told("vitals.outage_over", "nodes", "nothing hinders reading CPU, memory and health any more")


def hindrance_events(address: str, before: Health, after: Health) -> Iterator[Told]:
    """What a node lacks for its sessions to move, and did not lack before."""
    for hindrance in after.hindrances:
        if hindrance not in before.hindrances:
            yield Told("node.hindrance", address, f"{address}: {hindrance}")


def departed(address: str, departure: Departure) -> Told:
    """What came of the sessions of a node that is not being left any more, or has been left by all."""
    failed = sum(departure.failed.values())
    parts = [f"{departure.moved} sessions moved to other nodes in {departure.seconds:.0f} s"]
    if failed:
        reasons = ", ".join(f"{why} {count}" for why, count in departure.failed.items())
        parts.append(f"{failed} tries to move one failed ({reasons})")
    if departure.lost:
        parts.append(f"{departure.lost} sessions were lost")
    if departure.left:
        parts.append(f"{departure.left} sessions are left")
    data = {
        "seconds": departure.seconds,
        "moved": departure.moved,
        "failed": dict(departure.failed),
        "lost": departure.lost,
        "left": departure.left,
    }
    return Told("node.departure", address, f"{address}: {', '.join(parts)}", data)


def module_refusal(envoy: str, refusal: Refusal) -> Told:
    """A configuration that the module in an Envoy would not take."""
    data = {"extension": refusal.extension, "text": refusal.text}
    message = f"its module refused the configuration of `{refusal.extension}`: {refusal.text}"
    return Told("envoy.module_refusal", envoy, message, data)


def reload_message(changed: Reloaded) -> str:
    """What a reload did, in one sentence."""
    parts = []
    if changed.now:
        parts.append(f"in force now: {', '.join(changed.now)}")
    if changed.new_envoys:
        parts.append(f"for Envoys that start from now on: {', '.join(changed.new_envoys)}")
    if changed.restart:
        parts.append(f"only after a restart of the control plane: {', '.join(changed.restart)}")
    return "the configuration was read again; " + ("; ".join(parts) if parts else "nothing changed")
