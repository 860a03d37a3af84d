"""Changes told as sentences: what the log, the events and the console say of the same thing. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.model import Plan, Reloaded, Source, Topology

_NAMES = {Source.PD: "PD", Source.STATIC: "the configuration", Source.API: "the nodes added by hand"}

Told = tuple[str, str, str]  # kind, subject, message


def node_events(before: Plan, after: Plan) -> Iterator[Told]:
    """What became of the nodes from one plan to the next."""
    for address, planned in after.nodes.items():
        past = before.nodes.get(address)
        if past is None:
            yield "node.discovered", address, f"{address} is known from {_NAMES[planned.node.source]}"
        if past is None or past.state is not planned.state:
            yield "node.state", address, f"{address} is {planned.state}: {planned.reason}"
        if past is not None and past.endpoint and planned.endpoint and past.endpoint != planned.endpoint:
            yield (
                "node.moved",
                address,
                f"{address} resolves to {planned.endpoint} now, before to {past.endpoint}",
            )
    for address in sorted(before.nodes.keys() - after.nodes.keys()):
        yield "node.forgotten", address, f"{address} is forgotten: it left, and no session is waited for"
    if after.floor and not before.floor:
        yield "balance.floor", "nodes", after.floor
    if before.floor and not after.floor:
        yield "balance.floor_over", "nodes", "enough nodes pass their checks again; checks are trusted again"


def topology_events(before: Topology | None, after: Topology) -> Iterator[Told]:
    """What changed in a source besides its nodes."""
    name = _NAMES[after.source]
    outage = before.outage if before is not None else ""
    if after.outage and after.outage != outage:
        yield "source.outage", after.source.value, after.outage
    if outage and not after.outage:
        yield "source.recovered", after.source.value, f"{name} answers again"
    known = set(before.problems) if before is not None else set()
    for problem in after.problems:
        if problem not in known:
            yield (
                "source.problem",
                problem.subject,
                f"{problem.subject} in {name} is left out: {problem.reason}",
            )
    strangers = before.foreign if before is not None else {}
    for address, keyspace in after.foreign.items():
        if strangers.get(address) != keyspace:
            yield "node.foreign", address, f"{address} serves keyspace {keyspace}, so nothing is sent to it"


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
