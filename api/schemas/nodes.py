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

from api.schemas.common import utc_datetime
from api.schemas.drains import DrainProgressSchema, to_drain_progress_schema
from api.schemas.explanations import ExplanationSchema, to_explanation_schema
from api.schemas.node_metrics import NodeMetricsSchema, to_node_metrics_schema
from api.schemas.traffic import (
    ConfigRejectionSchema,
    EjectionSchema,
    TrafficSchema,
    to_config_rejection_schema,
    to_ejection_schema,
    to_traffic_fields,
)
from controlplane import address as addresses
from controlplane.decide.explain import NodeExplanation as Explained
from controlplane.model import envoys, events, health, intents, nodes, plan, views

MAX_LABELS = 64
MAX_DEADLINE_SECONDS = 604_800.0  # seconds: a week


def address_pattern() -> str:
    """`controlplane.address` as a regular expression, for clients that check before they send."""
    label = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
    name = rf"{label}(?:\.{label})*\.?"
    group = "[0-9A-Fa-f]{1,4}"
    shortened = "|".join(f"(?:{group}:){{1,{n}}}(?::{group}){{1,{7 - n}}}" for n in range(1, 7))
    ipv6 = f"(?:{group}:){{7}}{group}|(?:{group}:){{1,7}}:|:(?::{group}){{1,7}}|::|{shortened}"
    port = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
    return rf"^(?:{name}|\[(?:{ipv6})\]):{port}$"


def _canonical_address(value: str) -> str:
    return addresses.join(*addresses.split(value))


Address = Annotated[
    str,
    AfterValidator(_canonical_address),
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
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=MAX_LABELS)]


def coerce_integer(value: Any) -> Any:
    """To JSON Schema 7.0 is an integer too, as a client without integers writes it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Weight = Annotated[
    int,
    Field(ge=1, le=10_000, description="Capacity in relation to other nodes."),
    BeforeValidator(coerce_integer),
]


class _StrictRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AddNodeRequest(_StrictRequest):
    """A node to add by hand."""

    address: Address
    status_address: Address | None = Field(None, description="Default: status is not checked.")
    weight: Weight | None = None
    labels: Labels | None = None


class UpdateNodeRequest(_StrictRequest):
    """What to change of a node; what is absent or null stays."""

    weight: Weight | None = None
    labels: Labels | None = Field(
        None,
        description="Labels laid over those that the node has from its source. They replace all that were"
        " laid over before; `{}` takes those back.",
    )


class DrainRequest(_StrictRequest):
    """How to drain a node."""

    deadline_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=MAX_DEADLINE_SECONDS,
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


class RemoveNodeQuery(BaseModel):
    """How to remove a node."""

    model_config = ConfigDict(extra="forbid")

    force: bool = Field(
        False, description="End its sessions now; every Envoy must have Tidevoy's module for that."
    )


class ListNodesQuery(BaseModel):
    """What to tell of each node."""

    model_config = ConfigDict(extra="forbid")

    explain: bool = Field(False, description="Tell why each node has its share of the new sessions.")


# --- responses --------------------------------------------------------------------------------------------


class CheckResultSchema(BaseModel):
    """The latest outcome of one kind of check."""

    outcome: health.CheckStatus
    reason: str
    streak: int = Field(description="How many times in a row the outcome was this one.")
    at: datetime


class Checks(BaseModel):
    """What the checks say; null: switched off, or not run yet."""

    status: CheckResultSchema | None
    sql: CheckResultSchema | None


class DrainSchema(BaseModel):
    """A drain that an operator asked for."""

    since: datetime
    deadline: datetime
    on_deadline: intents.OnDeadline


class _NodeFields(BaseModel):
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
    advice: plan.EdsHealth | None = Field(description="What Envoys are told; null: they are not told of it.")
    endpoint: str | None = Field(
        description="`ip:port` that Envoys connect to; null: its name has no IP yet."
    )
    connections: int | None = Field(description="TiDB's own count of client connections; null: not known.")
    sessions: int | None = Field(description="Sessions of all Envoys on it; null: no Envoy has reported yet.")
    started_at: datetime | None = Field(description="When the TiDB server started; null: not known.")
    drain: DrainSchema | None
    departure: DrainProgressSchema | None = Field(description="null: it is not being left.")
    rebalance: int = Field(description="Sessions that are asked to move to other nodes, in this round.")
    ejected_by: list[EjectionSchema] = Field(
        description="Envoys with the module that have ejected it: they give it no new sessions for a while."
    )
    group: str = Field(description="The group that its labels put it in; empty: none.")
    backup: bool = Field(description="It serves only when no other node of its group does.")
    zone: str | None = Field(description="Where it is, by its label; null: not known.")
    vitals: NodeMetricsSchema | None = Field(description="null: nothing is known of its load and health.")
    explanation: ExplanationSchema | None = Field(
        description="Why it has its share of the new sessions; null: not asked for."
    )


class NodeSchema(TrafficSchema, _NodeFields):  # the fields of the last base come first
    """One TiDB server."""


class SourceProblem(BaseModel):
    """Something in a source of nodes that could not be used."""

    source: nodes.Source
    subject: str
    reason: str


class OtherKeyspaceNode(BaseModel):
    """A node of another keyspace; never routed to."""

    address: str
    keyspace: str


class NodeList(BaseModel):
    """All nodes, and what could not be used."""

    nodes: list[NodeSchema]
    problems: list[SourceProblem]
    foreign: list[OtherKeyspaceNode]
    excluded: list[str] = Field(
        description="Addresses that were removed and stay out until they are added again."
    )


class NackSchema(BaseModel):
    """An Envoy's refusal of what it was sent."""

    at: datetime
    type_url: str
    version: str
    message: str


class _EnvoyFields(BaseModel):
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
    last_nack: NackSchema | None
    refusal: ConfigRejectionSchema | None = Field(
        description="The last configuration that its module would not take."
    )
    sessions: int | None = Field(description="null: it has not reported yet.")


class EnvoySchema(TrafficSchema, _EnvoyFields):
    """One Envoy of the fleet."""


class ForgottenEnvoy(BaseModel):
    """An Envoy that has ended for good."""

    id: str


class EnvoyList(BaseModel):
    """The fleet."""

    envoys: list[EnvoySchema]


class EventSchema(BaseModel):
    """One event, as the `data` of a server-sent event."""

    id: int
    at: datetime
    kind: str
    subject: str
    message: str
    data: dict[str, Any]


class ReloadResultSchema(BaseModel):
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


def _optional_utc_datetime(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else utc_datetime(timestamp)


def to_node_schema(view: views.NodeView, explained: Explained | None = None) -> NodeSchema:
    """A node as the API shows it."""
    plan, facts = view.plan, view.plan.node
    return NodeSchema(
        address=facts.address,
        status_address=facts.status_address,
        source=facts.source,
        state=plan.state,
        reason=plan.reason,
        since=utc_datetime(plan.since),
        health=Checks(
            status=_to_check_result_schema(view.health.status), sql=_to_check_result_schema(view.health.sql)
        ),
        hindrances=list(view.health.migration_blockers),
        version=facts.version or view.health.version,
        labels=dict(facts.labels),
        weight=view.weight,
        published_weight=plan.weight,
        advice=plan.eds_health,
        endpoint=plan.endpoint,
        connections=view.connections,
        sessions=view.sessions,
        started_at=_optional_utc_datetime(facts.started_at),
        drain=_to_drain_schema(view.drain),
        departure=to_drain_progress_schema(view.drain_progress),
        rebalance=view.rebalancing_sessions,
        ejected_by=[to_ejection_schema(each) for each in view.ejections],
        group=plan.group,
        backup=plan.backup,
        zone=plan.zone or None,
        vitals=to_node_metrics_schema(view.metrics),
        explanation=to_explanation_schema(explained),
        **to_traffic_fields(view.traffic),
    )


def _to_check_result_schema(check: health.CheckResult | None) -> CheckResultSchema | None:
    if check is None:
        return None
    return CheckResultSchema(
        outcome=check.status, reason=check.reason, streak=check.consecutive, at=utc_datetime(check.at)
    )


def _to_drain_schema(drain: intents.DrainIntent | None) -> DrainSchema | None:
    if drain is None:
        return None
    deadline = utc_datetime(drain.since + drain.deadline_seconds)
    return DrainSchema(since=utc_datetime(drain.since), deadline=deadline, on_deadline=drain.on_deadline)


def to_source_problem_schema(problem: nodes.TopologyProblem) -> SourceProblem:
    """A source's problem as the API shows it."""
    return SourceProblem(source=problem.source, subject=problem.subject, reason=problem.reason)


def to_envoy_schema(view: views.EnvoyView) -> EnvoySchema:
    """An Envoy as the API shows it."""
    status = view.status
    return EnvoySchema(
        id=status.id,
        address=status.address,
        version=status.version,
        filter=status.filter,
        group=status.group,
        zone=status.zone or None,
        module_version=status.module_version or None,
        problem=status.problem or None,
        connected_since=_optional_utc_datetime(status.connected_since),
        last_seen=utc_datetime(status.last_seen),
        acked_version=status.acked_version,
        published_version=status.published_version,
        outdated=list(status.stale_resources),
        last_nack=_to_nack_schema(status.last_nack),
        refusal=to_config_rejection_schema(view.config_rejection),
        sessions=view.sessions,
        **to_traffic_fields(view.traffic),
    )


def _to_nack_schema(nack: envoys.Nack | None) -> NackSchema | None:
    if nack is None:
        return None
    return NackSchema(
        at=utc_datetime(nack.at), type_url=nack.type_url, version=nack.version, message=nack.message
    )


def to_event_schema(event: events.Event) -> EventSchema:
    """An event as the API shows it."""
    return EventSchema(
        id=event.id,
        at=utc_datetime(event.at),
        kind=event.kind,
        subject=event.subject,
        message=event.message,
        data=dict(event.data),
    )


def to_reload_result_schema(result: views.ReloadResult) -> ReloadResultSchema:
    """A reload's outcome as the API shows it."""
    return ReloadResultSchema(
        now=list(result.applied), new_envoys=list(result.needs_new_envoys), restart=list(result.needs_restart)
    )
