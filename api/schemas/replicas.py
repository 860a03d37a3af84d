"""JSON of the control planes that share one state."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import moment
from controlplane.replicas.membership import ReplicaView


class Replica(BaseModel):
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

    replicas: list[Replica]


def replica(view: ReplicaView) -> Replica:
    """A control plane as JSON."""
    return Replica(
        name=view.name,
        address=view.address,
        version=view.version,
        since=moment(view.since),
        leads=view.leads,
        led_since=moment(view.led_since) if view.led_since is not None else None,
        is_us=view.is_us,
        unheard=view.unheard,
    )
