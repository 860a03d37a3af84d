"""Schemas of nodes, Envoys, events, and config: strict requests, and responses converted from the model."""

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
from controlplane.decide.explain import NodeExplanation
from controlplane.model import envoys, events, health, intents, nodes, plan, views

MAX_LABELS = 64
MAX_DEADLINE_SECONDS = 604_800.0  # a week


def address_pattern() -> str:
    """Return the rules of `controlplane.address` as a regular expression, for validation by clients."""
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
    """Convert an integral float to int: for JSON Schema 7.0 is an integer, and some clients send floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Weight = Annotated[
    int,
    Field(ge=1, le=10_000, description="Capacity relative to other nodes."),
    BeforeValidator(coerce_integer),
]


class _StrictRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AddNodeRequest(_StrictRequest):
    """A node to add by hand."""

    address: Address
    status_address: Address | None = Field(None, description="Default: no status checks.")
    weight: Weight | None = None
    labels: Labels | None = None


class UpdateNodeRequest(_StrictRequest):
    """Changes to a node; absent or null fields stay unchanged."""

    weight: Weight | None = None
    labels: Labels | None = Field(
        None,
        description="Labels that override those from the node's source. They replace all earlier overrides;"
        " `{}` removes the overrides.",
    )


class DrainRequest(_StrictRequest):
    """The parameters of a drain."""

    deadline_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=MAX_DEADLINE_SECONDS,
            allow_inf_nan=False,
            description="Maximum time for the sessions to leave the node.",
        ),
    ] = 600.0
    on_deadline: Annotated[
        Literal["keep", "close"],
        Field(
            description="What happens to the remaining sessions at the deadline: `keep` leaves them, `close`"
            " ends them, for which every Envoy must have Tidevoy's module."
        ),
    ] = "keep"


class RemoveNodeQuery(BaseModel):
    """The query of a node's removal."""

    model_config = ConfigDict(extra="forbid")

    force: bool = Field(
        False, description="End its sessions at once; requires Tidevoy's module in every Envoy."
    )


class ListNodesQuery(BaseModel):
    """The query of the node list."""

    model_config = ConfigDict(extra="forbid")

    explain: bool = Field(False, description="Include the explanation of each node's share of new sessions.")


# --- responses --------------------------------------------------------------------------------------------


class CheckResultSchema(BaseModel):
    """The latest result of one kind of check."""

    outcome: health.CheckStatus
    reason: str
    streak: int = Field(description="Number of consecutive checks with this outcome.")
    at: datetime


class Checks(BaseModel):
    """The latest check results; null: disabled, or not run yet."""

    status: CheckResultSchema | None
    sql: CheckResultSchema | None


class DrainSchema(BaseModel):
    """A requested drain."""

    since: datetime
    deadline: datetime
    on_deadline: intents.OnDeadline


class _NodeFields(BaseModel):
    address: str
    status_address: str | None
    source: nodes.Source
    state: nodes.State
    reason: str = Field(description="Why it is in this state, as a sentence.")
    since: datetime = Field(description="When it entered this state.")
    health: Checks
    hindrances: list[str] = Field(
        description="Reasons in the node's own configuration why sessions cannot migrate from it, a sentence"
        " each."
    )
    version: str
    labels: dict[str, str]
    weight: int = Field(description="Configured capacity.")
    published_weight: int = Field(description="The weight published to Envoys; 0: no new sessions.")
    advice: plan.EdsHealth | None = Field(
        description="The EDS health status published to Envoys; null: the node is not published."
    )
    endpoint: str | None = Field(
        description="`ip:port` that Envoys connect to; null: its host name is not resolved yet."
    )
    connections: int | None = Field(description="TiDB's own count of client connections; null: unknown.")
    sessions: int | None = Field(description="Sessions of all Envoys on it; null: no Envoy has reported yet.")
    started_at: datetime | None = Field(description="When the TiDB server started; null: unknown.")
    drain: DrainSchema | None
    departure: DrainProgressSchema | None = Field(
        description="Progress while the node is drained or removed; otherwise null."
    )
    rebalance: int = Field(
        description="Sessions that the current rebalancing round is to migrate to other nodes."
    )
    ejected_by: list[EjectionSchema] = Field(
        description="Envoys with the module that have ejected it: they send it no new sessions for a while."
    )
    group: str = Field(description="The group that its labels assign it to; empty: none.")
    backup: bool = Field(description="Whether it serves only while no other node of its group does.")
    zone: str | None = Field(description="The zone from its label; null: unknown.")
    vitals: NodeMetricsSchema | None = Field(description="Its load and health metrics; null: unknown.")
    explanation: ExplanationSchema | None = Field(
        description="Why it has its share of the new sessions; null: not requested."
    )


class NodeSchema(TrafficSchema, _NodeFields):  # the fields of the last base come first
    """One TiDB server."""


class SourceProblem(BaseModel):
    """An invalid entry in a source of nodes."""

    source: nodes.Source
    subject: str
    reason: str


class OtherKeyspaceNode(BaseModel):
    """A node of another keyspace; never routed to."""

    address: str
    keyspace: str


class NodeList(BaseModel):
    """All nodes, and the invalid entries of their sources."""

    nodes: list[NodeSchema]
    problems: list[SourceProblem]
    foreign: list[OtherKeyspaceNode]
    excluded: list[str] = Field(
        description="Removed addresses, which stay excluded until they are added again."
    )


class NackSchema(BaseModel):
    """An Envoy's rejection (NACK) of an xDS response."""

    at: datetime
    type_url: str
    version: str
    message: str


class _EnvoyFields(BaseModel):
    id: str
    address: str
    version: str
    filter: str = Field(description="module, contrib or none.")
    group: str = Field(description="The only group of nodes that it serves; empty: all groups.")
    zone: str | None = Field(description="The zone that it reports; null: none.")
    module_version: str | None = Field(
        description="Version of Tidevoy's module that it reports; null: it has no module."
    )
    problem: str | None = Field(
        description="Why it serves no clients, or lacks a feature that it should have; null: no problem."
    )
    connected_since: datetime | None = Field(description="null: not connected now.")
    last_seen: datetime
    acked_version: str
    published_version: str
    outdated: list[str] = Field(
        description="Resources that it has in an older version until this Envoy is restarted."
    )
    last_nack: NackSchema | None
    refusal: ConfigRejectionSchema | None = Field(
        description="The last configuration that its module rejected."
    )
    sessions: int | None = Field(description="null: it has not reported yet.")


class EnvoySchema(TrafficSchema, _EnvoyFields):
    """One Envoy of the fleet."""


class ForgottenEnvoy(BaseModel):
    """An Envoy that was forgotten because it has stopped for good."""

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
    """The keys of the settings that a reload changed, by when they take effect."""

    now: list[str]
    new_envoys: list[str]
    restart: list[str]


class Alive(BaseModel):
    """The process responds."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The control plane is ready."""

    ready: Literal[True] = True


class About(BaseModel):
    """The version and the main paths of this server."""

    name: Literal["tidevoy"] = "tidevoy"
    version: str
    openapi: str
    nodes: str
    envoys: str


# --- conversion from the model -----------------------------------------------------------------------------


def _optional_utc_datetime(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else utc_datetime(timestamp)


def to_node_schema(view: views.NodeView, explanation: NodeExplanation | None = None) -> NodeSchema:
    """Convert a node to its schema."""
    plan, node = view.plan, view.plan.node
    return NodeSchema(
        address=node.address,
        status_address=node.status_address,
        source=node.source,
        state=plan.state,
        reason=plan.reason,
        since=utc_datetime(plan.since),
        health=Checks(
            status=_to_check_result_schema(view.health.status), sql=_to_check_result_schema(view.health.sql)
        ),
        hindrances=list(view.health.migration_blockers),
        version=node.version or view.health.version,
        labels=dict(node.labels),
        weight=view.weight,
        published_weight=plan.weight,
        advice=plan.eds_health,
        endpoint=plan.endpoint,
        connections=view.connections,
        sessions=view.sessions,
        started_at=_optional_utc_datetime(node.started_at),
        drain=_to_drain_schema(view.drain),
        departure=to_drain_progress_schema(view.drain_progress),
        rebalance=view.rebalancing_sessions,
        ejected_by=[to_ejection_schema(ejection) for ejection in view.ejections],
        group=plan.group,
        backup=plan.backup,
        zone=plan.zone or None,
        vitals=to_node_metrics_schema(view.metrics),
        explanation=to_explanation_schema(explanation),
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
    """Convert a source's problem to its schema."""
    return SourceProblem(source=problem.source, subject=problem.subject, reason=problem.reason)


def to_envoy_schema(view: views.EnvoyView) -> EnvoySchema:
    """Convert an Envoy to its schema."""
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
    """Convert an event to its schema."""
    return EventSchema(
        id=event.id,
        at=utc_datetime(event.at),
        kind=event.kind,
        subject=event.subject,
        message=event.message,
        data=dict(event.data),
    )


def to_reload_result_schema(result: views.ReloadResult) -> ReloadResultSchema:
    """Convert the result of a reload to its schema."""
    return ReloadResultSchema(
        now=list(result.applied), new_envoys=list(result.needs_new_envoys), restart=list(result.needs_restart)
    )
