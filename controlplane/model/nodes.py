"""Nodes as their sources describe them, and how they are identified. Frozen data: no I/O, no clock.

Times in this package are Unix seconds as floats, taken from one monotonic clock per process
(`controlplane.clock`), so that differences stay valid when the system clock is set. `None` means "never" or
"not known".

An address is the text `host:port`, IPv6 hosts in brackets (`[fd00::1]:4000`), exactly as in the topology key;
it identifies a node. An endpoint has the same form but always a literal IP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

EMPTY_MAP: Mapping[str, Any] = MappingProxyType({})

# Address and endpoint of a node: session counts use the one or the other as their key.
NodeKey = tuple[str, str]

GroupZone = tuple[str, str]  # a group and a zone

CLUSTER_NAME = "tidb"  # name of the xDS cluster with all nodes; clusters of groups add a suffix


class Source(StrEnum):
    """Where a node is defined. When two sources define the same address, the one listed first here wins."""

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
    git_hash: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    started_at: float | None = None
    weight: int = 100
    registered: bool = True  # False: PD has its `info` but no `ttl`, so it may be dead


@dataclass(frozen=True, slots=True)
class TopologyProblem:
    """An unusable entry of a source, described so that an operator can fix it."""

    source: Source
    subject: str  # the etcd key or the configuration key
    reason: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The complete content of one source; a later one replaces an earlier one of the same source."""

    source: Source
    nodes: Mapping[str, Node] = field(default_factory=lambda: EMPTY_MAP)
    # Keyspace by address, for nodes of other keyspaces than the configured one.
    other_keyspace: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    problems: tuple[TopologyProblem, ...] = ()
    is_complete: bool = False  # a complete list has been read at least once since start
    outage: str = ""  # why this is out of date, as a sentence; empty: it is current


@dataclass(frozen=True, slots=True)
class Resolution:
    """The last DNS answer for one host name. `ip` keeps its value when a later lookup fails."""

    host: str
    ip: str | None
    reason: str = ""  # why the last lookup failed; empty: it succeeded


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that serve the clients of one port or of some Envoys: the nodes that have all these labels.

    A node belongs to the first group that it matches, and to the group without a name if it matches none.
    """

    name: str
    labels: Mapping[str, str]
