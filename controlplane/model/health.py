"""What the checks found on a node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CANNOT_MIGRATE = "its sessions cannot move"  # how a migration blocker begins that lets no session move at all


class CheckStatus(StrEnum):
    """What one probe found."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    STOPPING = "stopping"  # the node answers, and says that it is starting up or shutting down


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The latest outcome of one kind of check on one node."""

    status: CheckStatus
    reason: str  # a sentence
    consecutive: int  # how many times in a row the outcome was this one, at least 1
    at: float


@dataclass(frozen=True, slots=True)
class Health:
    """What the checks know of a node. A check that is switched off or has not run yet is None."""

    status: CheckResult | None = None
    sql: CheckResult | None = None
    connections: int | None = None  # TiDB's own count of client connections, from `GET /status`
    connections_at: float | None = None
    version: str = ""  # MySQL-style version from `GET /status`
    migration_blockers: tuple[
        str, ...
    ] = ()  # what its configuration lacks for sessions to move, a sentence each


def blocks_migration(blocker: str) -> bool:
    """Whether no session can leave the node because of it, even when the node is drained in time."""
    return blocker.startswith(CANNOT_MIGRATE)
