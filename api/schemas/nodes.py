"""What goes over the wire: strict requests, and responses made from the control plane's words."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from api.schemas.common import moment
from api.schemas.drains import Departure, departure
from api.schemas.explanations import Explanation, explanation
from api.schemas.node_metrics import Vitals, vitals
from api.schemas.traffic import Ejection, Refusal, Traffic, ejection, refusal, traffic
from controlplane import address as addresses
from controlplane.decide.explain import Explanation as Explained
from controlplane.model import envoys, events, health, intents, nodes, plan, views

MOST_LABELS = 64
LONGEST_DEADLINE = 604_800.0  # seconds: a week


def address_pattern() -> str:
    """`controlplane.address` as a regular expression, for clients that check before they send."""
    label = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
    name = rf"{label}(?:\.{label})*\.?"
    group = "[0-9A-Fa-f]{1,4}"
    shortened = "|".join(f"(?:{group}:){{1,{n}}}(?::{group}){{1,{7 - n}}}" for n in range(1, 7))
    ipv6 = f"(?:{group}:){{7}}{group}|(?:{group}:){{1,7}}:|:(?::{group}){{1,7}}|::|{shortened}"
    port = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
    return rf"^(?:{name}|\[(?:{ipv6})\]):{port}$"


def _canonical(value: str) -> str:
    return addresses.join(*addresses.split(value))


Address = Annotated[
    str,
    AfterValidator(_canonical),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": address_pattern(),
            "maxLength": 255,
            "description": "`host:port`, an IPv6 host in brackets.",
            "examples": ["tidb-0.tidb-peer:4000", "[fd00::1]:4000"],
        }
    ),
]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
LabelValue = Annotated[str, StringConstraints(max_length=256)]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=MOST_LABELS)]


def integer(value: Any) -> Any:
    """To JSON Schema 7.0 is an integer too, as a client without integers writes it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Weight = Annotated[
    int,
    Field(ge=1, le=10_000, description="Capacity in relation to other nodes."),
    BeforeValidator(integer),
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NodeToAdd(_Request):
    """A node to add by hand."""

    address: Address
    status_address: Address | None = Field(None, description="Default: status is not checked.")
    weight: Weight | None = None
    labels: Labels | None = None


class NodeChange(_Request):
    """What to change of a node; what is absent or null stays."""

    weight: Weight | None = None
    labels: Labels | None = Field(
        None,
        description="Labels laid over those that the node has from its source. They replace all that were"
        " laid over before; `{}` takes those back.",
    )


class DrainRequest(_Request):
    """How to drain a node."""

    deadline_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=LONGEST_DEADLINE,
            allow_inf_nan=False,
            description="How long sessions may take to leave.",
        ),
    ] = 600.0
    on_deadline: Annotated[
        Literal["keep", "close"],
        Field(
            description="What happens to sessions that are left then: they stay, or they are ended, for which"
            " every Envoy must have Tidevoy's module."
        ),
    ] = "keep"


class RemoveQuery(BaseModel):
    """How to remove a node."""

    model_config = ConfigDict(extra="forbid")

    force: bool = Field(
        False, description="End its sessions now; every Envoy must have Tidevoy's module for that."
    )


class ListQuery(BaseModel):
    """What to tell of each node."""

    model_config = ConfigDict(extra="forbid")

    explain: bool = Field(False, description="Tell why each node has its share of the new sessions.")


# --- responses --------------------------------------------------------------------------------------------


class Probe(BaseModel):
    """The latest outcome of one kind of check."""

    outcome: health.Outcome
    reason: str
    streak: int = Field(description="How many times in a row the outcome was this one.")
    at: datetime


class Checks(BaseModel):
    """What the checks say; null: switched off, or not run yet."""

    status: Probe | None
    sql: Probe | None


class Drain(BaseModel):
    """A drain that an operator asked for."""

    since: datetime
    deadline: datetime
    on_deadline: intents.OnDeadline


class _Node(BaseModel):
    address: str
    status_address: str | None
    source: nodes.Source
    state: nodes.State
    reason: str = Field(description="Why it is in this state, as a sentence.")
    since: datetime = Field(description="When it came into this state.")
    health: Checks
    hindrances: list[str] = Field(
        description="What the node's own configuration lacks for sessions to move from it, a sentence each."
    )
    version: str
    labels: dict[str, str]
    weight: int = Field(description="Configured capacity.")
    published_weight: int = Field(description="What Envoys are told; 0: no new sessions.")
    advice: plan.Advice | None = Field(description="What Envoys are told; null: they are not told of it.")
    endpoint: str | None = Field(
        description="`ip:port` that Envoys connect to; null: its name has no IP yet."
    )
    connections: int | None = Field(description="TiDB's own count of client connections; null: not known.")
    sessions: int | None = Field(description="Sessions of all Envoys on it; null: no Envoy has reported yet.")
    started_at: datetime | None = Field(description="When the TiDB server started; null: not known.")
    drain: Drain | None
    departure: Departure | None = Field(description="null: it is not being left.")
    rebalance: int = Field(description="Sessions that are asked to move to other nodes, in this round.")
    ejected_by: list[Ejection] = Field(
        description="Envoys with the module that have ejected it: they give it no new sessions for a while."
    )
    group: str = Field(description="The group that its labels put it in; empty: none.")
    backup: bool = Field(description="It serves only when no other node of its group does.")
    zone: str | None = Field(description="Where it is, by its label; null: not known.")
    vitals: Vitals | None = Field(description="null: nothing is known of its load and health.")
    explanation: Explanation | None = Field(
        description="Why it has its share of the new sessions; null: not asked for."
    )


class Node(Traffic, _Node):  # the fields of the last base come first
    """One TiDB server."""


class SourceProblem(BaseModel):
    """Something in a source of nodes that could not be used."""

    source: nodes.Source
    subject: str
    reason: str


class ForeignNode(BaseModel):
    """A node of another keyspace; never routed to."""

    address: str
    keyspace: str


class NodeList(BaseModel):
    """All nodes, and what could not be used."""

    nodes: list[Node]
    problems: list[SourceProblem]
    foreign: list[ForeignNode]
    excluded: list[str] = Field(
        description="Addresses that were removed and stay out until they are added again."
    )


class Nack(BaseModel):
    """An Envoy's refusal of what it was sent."""

    at: datetime
    type_url: str
    version: str
    message: str


class _Envoy(BaseModel):
    id: str
    address: str
    version: str
    filter: str = Field(description="module, contrib or none.")
    group: str = Field(description="The only group of nodes that it serves; empty: all.")
    zone: str | None = Field(description="Where it is, as it says; null: it does not.")
    module_version: str | None = Field(
        description="Of Tidevoy's module, as the Envoy says; null: it has none."
    )
    problem: str | None = Field(
        description="Why it serves nobody, or without what it should have; null: all is well."
    )
    connected_since: datetime | None = Field(description="null: not connected now.")
    last_seen: datetime
    acked_version: str
    published_version: str
    outdated: list[str] = Field(
        description="What it runs in an older form until that Envoy is started again."
    )
    last_nack: Nack | None
    refusal: Refusal | None = Field(description="The last configuration that its module would not take.")
    sessions: int | None = Field(description="null: it has not reported yet.")


class Envoy(Traffic, _Envoy):
    """One Envoy of the fleet."""


class ForgottenEnvoy(BaseModel):
    """An Envoy that has ended for good."""

    id: str


class EnvoyList(BaseModel):
    """The fleet."""

    envoys: list[Envoy]


class Event(BaseModel):
    """One event, as the `data` of a server-sent event."""

    id: int
    at: datetime
    kind: str
    subject: str
    message: str
    data: dict[str, Any]


class Reloaded(BaseModel):
    """Paths of the settings that a reload changed, by when they take effect."""

    now: list[str]
    new_envoys: list[str]
    restart: list[str]


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The control plane does its work."""

    ready: Literal[True] = True


class About(BaseModel):
    """What answers here, and where to go on."""

    name: Literal["tidevoy"] = "tidevoy"
    version: str
    openapi: str
    nodes: str
    envoys: str


# --- from the control plane's words ------------------------------------------------------------------------


def _moment(at: float | None) -> datetime | None:
    return None if at is None else moment(at)


def node(view: views.NodeView, explained: Explained | None = None) -> Node:
    """A node as the API shows it."""
    plan, facts = view.plan, view.plan.node
    return Node(
        address=facts.address,
        status_address=facts.status_address,
        source=facts.source,
        state=plan.state,
        reason=plan.reason,
        since=moment(plan.since),
        health=Checks(status=_probe(view.health.status), sql=_probe(view.health.sql)),
        hindrances=list(view.health.hindrances),
        version=facts.version or view.health.version,
        labels=dict(facts.labels),
        weight=view.weight,
        published_weight=plan.weight,
        advice=plan.advice,
        endpoint=plan.endpoint,
        connections=view.connections,
        sessions=view.sessions,
        started_at=_moment(facts.started_at),
        drain=_drain(view.drain),
        departure=departure(view.departure),
        rebalance=view.rebalance,
        ejected_by=[ejection(each) for each in view.ejections],
        group=plan.group,
        backup=plan.backup,
        zone=plan.zone or None,
        vitals=vitals(view.vitals),
        explanation=explanation(explained),
        **traffic(view.traffic),
    )


def _probe(probe: health.Probe | None) -> Probe | None:
    if probe is None:
        return None
    return Probe(outcome=probe.outcome, reason=probe.reason, streak=probe.streak, at=moment(probe.at))


def _drain(drain: intents.Drain | None) -> Drain | None:
    if drain is None:
        return None
    deadline = moment(drain.since + drain.deadline_seconds)
    return Drain(since=moment(drain.since), deadline=deadline, on_deadline=drain.on_deadline)


def source_problem(problem: nodes.Problem) -> SourceProblem:
    """A source's problem as the API shows it."""
    return SourceProblem(source=problem.source, subject=problem.subject, reason=problem.reason)


def envoy(view: views.EnvoyView) -> Envoy:
    """An Envoy as the API shows it."""
    status = view.status
    return Envoy(
        id=status.id,
        address=status.address,
        version=status.version,
        filter=status.filter,
        group=status.group,
        zone=status.zone or None,
        module_version=status.module_version or None,
        problem=status.problem or None,
        connected_since=_moment(status.connected_since),
        last_seen=moment(status.last_seen),
        acked_version=status.acked_version,
        published_version=status.published_version,
        outdated=list(status.outdated),
        last_nack=_nack(status.last_nack),
        refusal=refusal(view.refusal),
        sessions=view.sessions,
        **traffic(view.traffic),
    )


def _nack(nack: envoys.Nack | None) -> Nack | None:
    if nack is None:
        return None
    return Nack(at=moment(nack.at), type_url=nack.type_url, version=nack.version, message=nack.message)


def event(event: events.Event) -> Event:
    """An event as the API shows it."""
    return Event(
        id=event.id,
        at=moment(event.at),
        kind=event.kind,
        subject=event.subject,
        message=event.message,
        data=dict(event.data),
    )


def reloaded(result: views.Reloaded) -> Reloaded:
    """A reload's outcome as the API shows it."""
    return Reloaded(now=list(result.now), new_envoys=list(result.new_envoys), restart=list(result.restart))
