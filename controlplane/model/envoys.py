"""An Envoy as its xDS stream shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nack:
    """An Envoy's refusal of what it was sent."""

    at: float
    type_url: str
    version: str
    message: str


@dataclass(frozen=True, slots=True)
class EnvoyStatus:
    """One Envoy as its stream shows it."""

    id: str
    address: str
    version: str
    filter: str
    connected_since: float | None  # None: not connected now
    last_seen: float
    acked_version: str = ""
    published_version: str = ""
    eds_acked: bool = True  # it routes by the endpoints that were published last, or by none at all
    group: str = ""  # the only one that it is there for; empty: all
    zone: str = ""  # where it is, as it says itself; empty: not known
    module_version: str = ""  # of Tidevoy's module, as it says itself; empty: it has none
    problem: str = ""  # why it serves nobody, or without what it should have; empty: all is well
    streams: int = 1  # open ones; more than one means that Envoys share an id
    stale_resources: tuple[str, ...] = ()  # what it runs in an older form until it is started again
    last_nack: Nack | None = None
    nacks: int = 0
    certificate_expires_at: float | None = None  # when the one ends that it has shown; None: it showed none
