"""Results of the health checks of a node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CANNOT_MIGRATE = "its sessions cannot migrate"  # prefix of the blockers that prevent every migration


class CheckStatus(StrEnum):
    """Result of one probe."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    STOPPING = "stopping"  # the node responds and reports that it is starting up or shutting down
    FULL = "full"  # the node has too many connections to be checked
    MISCONFIGURED = "misconfigured"  # the settings of the check or the user's privileges prevent it


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The latest result of one kind of check on one node."""

    status: CheckStatus
    reason: str  # a sentence
    consecutive: int  # number of consecutive checks with this status, at least 1
    at: float


@dataclass(frozen=True, slots=True)
class Health:
    """Check results of a node. A check that is disabled or has not run yet is None."""

    status: CheckResult | None = None
    sql: CheckResult | None = None
    statement: CheckResult | None = None
    connections: int | None = None  # TiDB's own count of client connections, from `GET /status`
    connections_at: float | None = None
    version: str = ""  # MySQL-style version from `GET /status`
    # Why settings of the node prevent sessions from migrating, or from migrating in time; one sentence each.
    migration_blockers: tuple[str, ...] = ()


def blocks_migration(blocker: str) -> bool:
    """Return whether the blocker prevents every migration from the node, even during a drain."""
    return blocker.startswith(CANNOT_MIGRATE)
