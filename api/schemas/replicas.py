"""Schema of the control-plane replicas that share one state."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.replicas.membership import ReplicaView


class ReplicaSchema(BaseModel):
    """One control plane."""

    name: str
    address: str = Field(description="Address at which other control planes reach its xDS server.")
    version: str = Field(description="Tidevoy's version.")
    since: datetime = Field(description="Start time of the control plane.")
    leads: bool = Field(description="Whether it is the leader, which decides and runs rollouts.")
    led_since: datetime | None = Field(description="When it became the leader; null: it is not the leader.")
    is_us: bool = Field(description="Whether it is the control plane that sends this response.")
    unheard: str = Field(
        description="Why this control plane receives no reports about its Envoys; empty: it receives them."
    )


class ReplicaList(BaseModel):
    """All control planes; empty if `replicas.enabled` is false."""

    replicas: list[ReplicaSchema]


def to_replica_schema(view: ReplicaView) -> ReplicaSchema:
    """Convert a replica to its schema."""
    return ReplicaSchema(
        name=view.name,
        address=view.address,
        version=view.version,
        since=utc_datetime(view.since),
        leads=view.is_leader,
        led_since=utc_datetime(view.leader_since) if view.leader_since is not None else None,
        is_us=view.is_self,
        unheard=view.unreachable,
    )
