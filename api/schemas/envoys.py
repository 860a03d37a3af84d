"""Schemas of the Envoys of the fleet, and of the control planes that share their state in PD (replicas)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from api.schemas.common import OptionalText, ResponseModel, StrictRequest, attribute
from api.schemas.traffic import ConfigRejectionDetails, TrafficDetails

OnOff = Annotated[Literal["on", "off"], BeforeValidator(lambda is_on: "on" if is_on else "off")]


class NackDetails(ResponseModel):
    """An Envoy's rejection (NACK) of an xDS response."""

    at: datetime
    type_url: str
    version: str
    message: str


class SwitchOverrides(ResponseModel):
    """Switches of the module that an operator has set for one Envoy."""

    offload: OnOff | None
    migration: OnOff | None
    ready: OnOff | None
    drain: OnOff | None


class ChangeEnvoyRequest(StrictRequest):
    """Changes to an Envoy; absent fields stay unchanged, and null means that the settings apply."""

    offload: Literal["on", "off"] | None = Field(
        None,
        description="`off`: all bytes of its sessions go through Envoy's own events and buffers."
        " Only while a session migrates does the module handle its events.",
    )
    migration: Literal["on", "off"] | None = Field(
        None, description="`off`: no session of this Envoy migrates."
    )
    ready: Literal["on", "off"] | None = Field(
        None,
        description="`off`: the Envoy tells load balancers that it is not ready for new clients (`/readyz`)."
        " It still serves those that come.",
    )
    drain: Literal["on", "off"] | None = Field(
        None,
        description="`on`: the Envoy is not ready; after `end.wait` it refuses new clients, and sessions end"
        " when they are idle; those that are left after `end.timeout` are closed.",
    )

    @property
    def switches(self) -> dict[str, bool | None]:
        """The fields that are present, with None for null."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: None if value is None else value == "on" for name, value in values.items()}


class _EnvoyFields(ResponseModel):
    id: str = attribute("status.id")
    address: str = attribute("status.address")
    version: str = attribute("status.version")
    filter: str = attribute("status.filter", "The MySQL filter that the Envoy gets: module, contrib or none.")
    group: str = attribute(
        "status.group", "The only group of nodes that the Envoy serves; empty if it serves all groups."
    )
    zone: OptionalText = attribute("status.zone", "The zone that the Envoy reports; null if it reports none.")
    module_version: OptionalText = attribute(
        "status.module_version", "Version of the Envoy's Tidevoy module; null if it has none."
    )
    problem: OptionalText = attribute(
        "status.problem",
        "Why the Envoy serves no clients, or lacks a feature that it should have; null without a problem.",
    )
    connected_since: datetime | None = attribute(
        "status.connected_since", "When the Envoy connected; null if it is not connected now."
    )
    streams: int = attribute(
        "status.streams", "Open xDS streams. If there are several, several Envoys may have this id."
    )
    last_seen: datetime = attribute("status.last_seen")
    acked_version: str = attribute("status.acked_version")
    published_version: str = attribute("status.published_version")
    stale_resources: list[str] = attribute(
        "status.stale_resources",
        "Resources of which the Envoy keeps an older version until it is restarted.",
    )
    stale_settings: list[str] = attribute(
        "status.stale_settings",
        "Settings that the Envoy applies only when it is restarted. Empty if they are not known, such as"
        " after a restart of the control plane.",
    )
    last_nack: NackDetails | None = attribute("status.last_nack")
    config_rejection: ConfigRejectionDetails | None = Field(
        description="The last configuration that the Envoy's module rejected."
    )
    offload: OnOff | None = attribute(
        "switches.offload",
        "Whether the module handles the events of established sessions instead of Envoy; null without the"
        " module.",
        default=None,
    )
    migration: OnOff | None = attribute(
        "switches.migration", "Whether sessions of the Envoy migrate; null without the module.", default=None
    )
    overrides: SwitchOverrides = Field(
        description="What was set for this Envoy; null: it follows the settings `module.*`."
    )
    runtime_off: Annotated[list[str], BeforeValidator(sorted)] = Field(
        description="The parts, `offload` or `migration`, that Envoy's own runtime has switched off."
    )
    sessions: int | None = Field(description="The Envoy's client sessions; null if it has not reported yet.")


class EnvoyDetails(TrafficDetails, _EnvoyFields):  # the fields of the last base come first
    """One Envoy of the fleet."""


class ForgottenEnvoy(ResponseModel):
    """An Envoy that was forgotten because it has stopped permanently."""

    id: str


class EnvoyList(ResponseModel):
    """The fleet."""

    envoys: list[EnvoyDetails]


class ReplicaDetails(ResponseModel):
    """One control plane."""

    name: str
    address: str = Field(description="Address at which other control planes reach its xDS server.")
    version: str = Field(description="Tidevoy's version.")
    since: datetime = Field(description="Start time of the control plane.")
    is_leader: bool = Field(description="Whether this is the leader, which makes the plan and runs rollouts.")
    leader_since: datetime | None = Field(
        description="When it became the leader; null if it is not the leader."
    )
    is_self: bool = Field(description="Whether it is the control plane that sends this response.")
    unreachable: str = Field(
        description="Why the control plane that sends this response receives no reports about the Envoys of"
        " this replica; empty if it receives them."
    )


class ReplicaList(ResponseModel):
    """All control planes; empty if `replicas.enabled` is false."""

    replicas: list[ReplicaDetails]
