"""Limits of client connections over all Envoys together, their quotas, and what Envoys use of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.model.nodes import EMPTY_MAP

TOTAL = "total"
"""The name of the limits of all connections; the module knows it, too."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """A limit. A connection counts if both user and network fit."""

    name: str
    user: str | None = None  # None: all users
    network: str | None = None  # None: all networks
    max_connections: int = 0  # 0: unlimited
    max_new_per_second: float = 0.0  # 0: unlimited


@dataclass(frozen=True, slots=True)
class LimitPlan:
    """How a limit is divided among the Envoys."""

    rule: LimitRule
    # Connections that each Envoy process may have, by its instance. Empty if connections are unlimited.
    quotas: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    unlisted: int = 0  # connections of an Envoy process without a quota: it has not reported yet
    envoys: int = 1  # the rate is divided by this number of Envoys
    # Larger quotas that some Envoys may still enforce, because they have not reported the present ones.
    in_force: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    # The id of the Envoy of each process, since a new process replaces the one before with the same id.
    ids: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    changed_at: float = field(default=0.0, compare=False)  # when the quotas last changed


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """What one Envoy process uses of a limit, as its module reports it."""

    connections: int = 0
    quota: int = 0  # the quota that it enforces; 0 also if connections are unlimited
    is_over_quota: bool = False  # whether the quota has refused a connection in the last seconds
    refused: int = 0  # since the start of the process, also by the rate
