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
    has_acknowledged_endpoints: bool = True  # has acknowledged the latest endpoints, or has no clusters
    group: str = ""  # the only node group that it uses; empty: all groups
    zone: str = ""  # zone that the Envoy reports for itself; empty: unknown
    module_version: str = ""  # version of the Tidevoy module that it reports; empty: no module
    problem: str = ""  # why it serves no traffic, or only with reduced function; empty: none
    streams: int = 1  # open streams; more than one means that several Envoys share an id
    stale_resources: tuple[str, ...] = ()  # resources that stay outdated until it is restarted
    stale_settings: tuple[str, ...] = ()  # settings that it applies only when restarted, if they are known
    last_nack: Nack | None = None
    nacks: int = 0
    certificate_expires_at: float | None = None  # expiry of its client certificate; None: it has none
