"""State of an Envoy as observed on its xDS stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nack:
    """An Envoy's rejection (NACK) of a response on its xDS stream."""

    at: float
    type_url: str
    version: str
    message: str


@dataclass(frozen=True, slots=True)
class EnvoyStatus:
    """Status of one Envoy, taken from its xDS stream."""

    id: str
    address: str
    version: str
    filter: str
    connected_since: float | None  # None: not connected
    last_seen: float
    acked_version: str = ""
    published_version: str = ""
    eds_acked: bool = True  # it acknowledged the endpoints published last, or has none
    group: str = ""  # the only node group it serves; empty: all groups
    zone: str = ""  # zone that the Envoy reports for itself; empty: not known
    module_version: str = ""  # version of the Tidevoy module that it reports; empty: no module
    problem: str = ""  # why it serves no traffic, or only with reduced function; empty: none
    streams: int = 1  # open streams; more than one means that several Envoys share an id
    stale_resources: tuple[str, ...] = ()  # resources that stay outdated until it is restarted
    last_nack: Nack | None = None
    nacks: int = 0
    certificate_expires_at: float | None = None  # when the one ends that it has shown; None: it showed none
