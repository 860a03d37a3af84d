"""Nodes as their sources describe them, and what identifies them. Frozen data: no I/O, no clock.

Times in this package are Unix seconds as floats, taken from one steady clock per process
(`controlplane.clock`), so that differences are meaningful even when the system clock is set. `None` means
"never" or "not known".

An address is the text `host:port`, IPv6 hosts in brackets (`[fd00::1]:4000`), exactly as it stands in the
topology key; it is the identity of a node. An endpoint is the same shape but always a literal IP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

EMPTY_MAP: Mapping[str, Any] = MappingProxyType({})


NodeKey = tuple[
    str, str
]  # the address and the endpoint of a node: who counts its sessions goes by one of them


GroupZone = tuple[str, str]  # a group and a zone

CLUSTER_NAME = "tidb"  # of the xDS cluster that holds all nodes; those of groups have a suffix


class Source(StrEnum):
    """Who told us of a node; where two tell of the same address, the earlier one here wins."""

    PD = "pd"
    STATIC = "static"
    API = "api"


class State(StrEnum):
    """Where a node is in its life (the table is in docs/concepts/overview.md)."""

    JOINING = "joining"
    ACTIVE = "active"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    DRAINED = "drained"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Node:
    """One TiDB server as a source describes it."""

    address: str
    source: Source
    status_address: str | None = None
    version: str = ""
    git_hash: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    started_at: float | None = None
    weight: int = 100
    registered: bool = True  # False: `info` is there but its `ttl` is not, so nobody vouches for it


@dataclass(frozen=True, slots=True)
class TopologyProblem:
    """Something in a source that could not be used, told so that a person can mend it."""

    source: Source
    subject: str  # the etcd key or the configuration key
    reason: str


@dataclass(frozen=True, slots=True)
class Topology:
    """All that one source says, whole: a later one replaces an earlier one of the same source."""

    source: Source
    nodes: Mapping[str, Node] = field(default_factory=lambda: EMPTY_MAP)
    other_keyspace: Mapping[str, str] = field(
        default_factory=lambda: EMPTY_MAP
    )  # address -> its other keyspace
    problems: tuple[TopologyProblem, ...] = ()
    is_complete: bool = False  # a whole list has been read at least once since start
    outage: str = ""  # why this is not up to date, as a sentence; empty when it is


@dataclass(frozen=True, slots=True)
class Resolution:
    """The last answer of DNS for one host name. `ip` is kept when a later look-up fails."""

    host: str
    ip: str | None
    reason: str = ""  # why there is no (new) answer; empty when the last look-up succeeded


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that clients of one port, or of some Envoys, are led to: those that have all these labels.

    A node is in the first group that it fits. Those that fit none are in the group that has no name.
    """

    name: str
    labels: Mapping[str, str]
