"""Schemas of nodes: the requests that change them, and their state, load, drain and share."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from api.schemas.common import (
    Address,
    Labels,
    OptionalText,
    Ratio,
    ResponseModel,
    Seconds,
    StrictQuery,
    StrictRequest,
    attribute,
    to_integer,
)
from api.schemas.traffic import EjectionDetails, TrafficDetails
from controlplane.decide.explain import NodeExplanation
from controlplane.model import health, intents, nodes, plan
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.views import NodeView

Weight = Annotated[
    int,
    Field(ge=1, le=10_000, description="Capacity relative to other nodes."),
    BeforeValidator(to_integer),
]


class AddNodeRequest(StrictRequest):
    """A node to add by hand."""

    address: Address
    status_address: Address | None = Field(
        None, description="The address of TiDB's status port; without it, there are no status checks."
    )
    weight: Weight | None = None
    labels: Labels | None = None


class UpdateNodeRequest(StrictRequest):
    """Changes to a node; absent or null fields stay unchanged."""

    weight: Weight | None = None
    labels: Labels | None = Field(
        None,
        description="Labels that override those from the node's source. They replace all earlier overrides;"
        " `{}` removes the overrides.",
    )


class DrainRequest(StrictRequest):
    """The parameters of a drain."""

    deadline_seconds: Seconds = Field(
        default=600.0, description="Maximum time for the sessions to leave the node."
    )
    on_deadline: Literal["keep", "close"] = Field(
        default="keep",
        description="What happens to the remaining sessions at the deadline: `keep` leaves them, `close`"
        " ends them, for which every Envoy must have Tidevoy's module.",
    )


class RemoveNodeQuery(StrictQuery):
    """The query of a node's removal."""

    force: bool = Field(
        False, description="End the node's sessions at once; requires Tidevoy's module in every Envoy."
    )


class ListNodesQuery(StrictQuery):
    """The query of the node list."""

    explain: bool = Field(False, description="Include the explanation of each node's share of new sessions.")


class HealthCheck(ResponseModel):
    """The latest result of one kind of check."""

    status: health.CheckStatus
    reason: str
    consecutive: int = Field(description="Number of consecutive checks with this status.")
    at: datetime


class HealthChecks(ResponseModel):
    """The latest check results; null if a check is disabled or has not run yet."""

    status: HealthCheck | None
    sql: HealthCheck | None
    statement: HealthCheck | None


class Drain(ResponseModel):
    """A requested drain."""

    since: datetime
    deadline: datetime
    on_deadline: intents.OnDeadline

    @model_validator(mode="before")
    @classmethod
    def _read(cls, drain: intents.DrainIntent) -> dict[str, Any]:
        deadline = drain.since + drain.deadline_seconds
        return {"since": drain.since, "deadline": deadline, "on_deadline": drain.on_deadline}


class DrainProgressDetails(ResponseModel):
    """The progress since the start of a drain or removal, as Envoys with the module report it."""

    since: datetime
    left: int | None = attribute("sessions_left", "Sessions that are still on the node; null if unknown.")
    migrated: int = Field(description="Sessions that have migrated to other nodes.")
    failed: dict[str, int] = Field(
        description="Migration attempts after which the session stayed, by reason; Envoy may retry them."
    )
    lost: int = Field(description="Sessions that a migration attempt ended.")
    not_movable: dict[str, int] = Field(description="Sessions that cannot migrate at the moment, by reason.")
    seconds_left: Annotated[float, AfterValidator(lambda seconds: round(seconds, 3))] | None = Field(
        description="Estimated seconds until all movable sessions have migrated; null if unknown."
    )


class NodeMetricsDetails(ResponseModel):
    """The last known values, as ratios unless noted otherwise; null (neither 0 nor 1) if unknown."""

    cpu: Ratio | None = Field(description="CPU usage, as a fraction of the CPU quota.")
    cpu_quota: float | None = Field(description="CPU quota in cores.")
    memory: Ratio | None = Field(description="Memory usage, as a fraction of the memory limit.")
    pd_failures: Ratio | None = Field(
        description="Ratio of failed to successful requests to PD in two minutes."
    )
    tikv_failures: Ratio | None = Field(
        description="Ratio of failures to requests to TiKV in two minutes; may exceed 1."
    )
    at: datetime | None = Field(description="Time of the newest of these values.")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, metrics: NodeMetrics) -> dict[str, Any]:
        values = {name: getattr(metrics, name) for name in ("cpu", "memory", "pd_failures", "tikv_failures")}
        at = max((value.at for value in values.values() if value is not None), default=None)
        ratios = {name: None if value is None else value.value for name, value in values.items()}
        return {**ratios, "cpu_quota": metrics.cpu_quota, "at": at}


class ShareFactor(ResponseModel):
    """One factor that influences a node's share."""

    name: str = Field(description="state, labels, health, memory, cpu, location or connections.")
    score: float | None = Field(
        description="The node's score, 0 is best; null if it is unknown or not considered."
    )
    share: Ratio | None = Field(
        description="The fraction of the node's share that remains after this factor; null if the"
        " factor does not reduce shares."
    )
    reason: str = Field(description="An explanation of the factor, as a sentence.")


class ShareExplanation(ResponseModel):
    """Why a node has its share of new sessions."""

    factors: list[ShareFactor] = Field(description="In the order in which they are applied.")
    weight: int = Field(description="The weight published to Envoys; 0 means no new sessions.")
    share: Ratio = Field(
        description="Share of the new sessions of its group or, with zone-aware routing, of its zone."
    )
    sentence: str


class _NodeFields(ResponseModel):
    address: str = attribute("plan.node.address")
    status_address: str | None = attribute("plan.node.status_address")
    source: nodes.Source = attribute("plan.node.source")
    state: nodes.State = attribute("plan.state")
    reason: str = attribute("plan.reason", "Why the node is in this state, as a sentence.")
    since: datetime = attribute("plan.since", "When the node entered this state.")
    health: HealthChecks
    migration_blockers: list[str] = attribute(
        "health.migration_blockers",
        "Reasons in the node's own configuration why sessions cannot migrate from it, a sentence each.",
    )
    version: str = attribute("plan.node.version")
    labels: dict[str, str] = attribute("plan.node.labels")
    weight: int = Field(description="Configured capacity.")
    published_weight: int = attribute(
        "plan.weight", "The weight published to Envoys; 0 means no new sessions."
    )
    eds_health: plan.EdsHealth | None = attribute(
        "plan.eds_health", "The EDS health status published to Envoys; null if the node is not published."
    )
    endpoint: str | None = attribute(
        "plan.endpoint", "`ip:port` that Envoys connect to; null while its host name is not resolved."
    )
    connections: int | None = Field(description="TiDB's own count of client connections; null if unknown.")
    sessions: int | None = Field(
        description="Sessions of all Envoys on the node; null if no Envoy has reported yet."
    )
    started_at: datetime | None = attribute(
        "plan.node.started_at", "When the TiDB server started; null if unknown."
    )
    drain: Drain | None
    drain_progress: DrainProgressDetails | None = Field(
        description="Progress while the node is drained or removed; otherwise null."
    )
    rebalance: int = attribute(
        "rebalancing_sessions", "Sessions that the current rebalancing round is to migrate to other nodes."
    )
    ejected_by: list[EjectionDetails] = attribute(
        "ejections",
        "Envoys whose module has ejected the node: they send it no new sessions for a while.",
    )
    group: str = attribute("plan.group", "The group that the node's labels assign it to; empty if none.")
    backup: bool = attribute(
        "plan.backup", "Whether the node serves only while no other node of its group does."
    )
    zone: OptionalText = attribute("plan.zone", "The zone from the node's label; null if unknown.")
    metrics: NodeMetricsDetails | None = Field(
        description="The node's load and health metrics; null if unknown."
    )
    explanation: ShareExplanation | None = Field(
        None, description="Why the node has its share of new sessions; null if not requested."
    )


class NodeDetails(TrafficDetails, _NodeFields):  # the fields of the last base come first
    """One TiDB server."""

    @classmethod
    def read(cls, view: NodeView, explanation: NodeExplanation | None = None) -> NodeDetails:
        """Return the details of a node, with the explanation of its share if there is one."""
        details = cls.model_validate(view)
        details.version = details.version or view.health.version
        if explanation is not None:
            details.explanation = ShareExplanation.model_validate(explanation)
        return details


class SourceProblem(ResponseModel):
    """An invalid entry in a source of nodes."""

    source: nodes.Source
    subject: str
    reason: str


class OtherKeyspaceNode(ResponseModel):
    """A node of another keyspace. It gets no traffic."""

    address: str
    keyspace: str


class NodeList(ResponseModel):
    """All nodes, and the invalid entries of their sources."""

    nodes: list[NodeDetails]
    problems: list[SourceProblem]
    other_keyspace: list[OtherKeyspaceNode]
    excluded: list[str] = Field(
        description="Removed addresses, which stay excluded until they are added again."
    )
