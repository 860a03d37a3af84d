"""Nodes, their states, and the sources that define nodes. Frozen data: no I/O.

All times in `controlplane.model` are Unix seconds from `controlplane.clock`. That clock is monotonic, so time
differences stay valid when the system clock is set. A time that is `None` means "never" or "unknown".

An address (`host:port`, IPv6 hosts in brackets: `[fd00::1]:4000`) identifies a node. An endpoint has the same
form, but its host is always a literal IP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

EMPTY_MAP: Mapping[str, Any] = MappingProxyType({})

# (address, endpoint) of a node. The Tidevoy module counts sessions by address, load reports by endpoint.
NodeKey = tuple[str, str]

GroupZone = tuple[str, str]  # (name of a node group, zone)

CLUSTER_NAME = "tidb"  # name of the xDS cluster with all nodes; the clusters of node groups add a suffix


class Source(StrEnum):
    """Where a node is defined. If several sources define an address, the first of them in this order wins."""

    PD = "pd"
    STATIC = "static"
    API = "api"


class State(StrEnum):
    """Lifecycle state of a node (docs/concepts/overview.md has the table)."""

    JOINING = "joining"
    ACTIVE = "active"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    DRAINED = "drained"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Node:
    """One TiDB server as its source describes it."""

    address: str
    source: Source
    status_address: str | None = None
    version: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    started_at: float | None = None
    weight: int = 100
    registered: bool = True  # False if PD has its key `info` but not its leased key `ttl`; it may be down


@dataclass(frozen=True, slots=True)
class TopologyProblem:
    """An unusable entry of a source, described so that an operator can fix it."""

    source: Source
    subject: str  # the etcd key or the configuration key
    reason: str


@dataclass(frozen=True, slots=True)
class Topology:
    """A snapshot of one source; it replaces the previous snapshot of that source."""

    source: Source
    nodes: Mapping[str, Node] = field(default_factory=lambda: EMPTY_MAP)
    # By address: the keyspace of each node that does not belong to the configured keyspace.
    other_keyspace: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    problems: tuple[TopologyProblem, ...] = ()
    is_complete: bool = False  # the source has been read completely at least once since the start
    outage: str = ""  # why this topology is out of date, as a sentence; empty: it is current


@dataclass(frozen=True, slots=True)
class Resolution:
    """The latest DNS result for one host name. If a lookup fails, `ip` keeps its previous value."""

    host: str
    ip: str | None
    reason: str = ""  # why the last lookup failed; empty: it succeeded


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes that have all of `labels`. They serve the clients of one port or of some Envoys.

    A node belongs to the first group that it matches, or to the group without a name if it matches no group.
    """

    name: str
    labels: Mapping[str, str]
