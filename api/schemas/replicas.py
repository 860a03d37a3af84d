"""JSON of the control planes that share one state."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.replicas.membership import ReplicaView


class ReplicaSchema(BaseModel):
    """One control plane."""

    name: str
    address: str = Field(description="At which other control planes reach its xDS server.")
    version: str = Field(description="Of Tidevoy.")
    since: datetime = Field(description="When it started.")
    leads: bool = Field(description="Whether it decides, and runs rollouts.")
    led_since: datetime | None = Field(description="Null: it does not lead.")
    is_us: bool = Field(description="Whether it is the one that answers.")
    unheard: str = Field(description="Why nothing is heard of its Envoys; empty: it tells of them.")


class ReplicaList(BaseModel):
    """All control planes; none where `replicas.enabled` is false."""

    replicas: list[ReplicaSchema]


def to_replica_schema(view: ReplicaView) -> ReplicaSchema:
    """A control plane as JSON."""
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
