"""Schemas of the limits of client connections."""

from __future__ import annotations

from pydantic import Field

from api.schemas.common import ResponseModel, attribute


class EnvoyLimitDetails(ResponseModel):
    """What one Envoy uses of a limit."""

    envoy: str = Field(description="Id of the Envoy.")
    connections: int = Field(description="Connections to the Envoy that the rule counts.")
    quota: int | None = Field(
        description="Connections that the Envoy accepts at present; null if the rule limits no connections."
    )
    refused: int = Field(description="Connections that the Envoy has refused since its start.")


class LimitDetails(ResponseModel):
    """A limit, and what the Envoys use of it."""

    name: str = attribute("rule.name", "Name of the rule; `total` for the limits of all connections.")
    user: str | None = attribute("rule.user", "The user whose connections count; null: all users.")
    network: str | None = attribute(
        "rule.network", "The network whose connections count; null: all networks."
    )
    max_connections: int = attribute(
        "rule.max_connections", "Maximum connections to all Envoys together; 0: unlimited."
    )
    max_new_connections_per_second: float = attribute(
        "rule.max_new_per_second", "Maximum rate of new connections to all Envoys together; 0: unlimited."
    )
    connections: int = Field(description="Connections to all Envoys that the rule counts.")
    refused: int = Field(description="Connections that these Envoys have refused since their start.")
    envoys: list[EnvoyLimitDetails] = Field(description="The Envoys that have reported.")


class LimitList(ResponseModel):
    """All limits; empty if none is set."""

    limits: list[LimitDetails]
