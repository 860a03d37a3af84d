"""Schemas of the traffic that Envoys' modules report, per node and per Envoy."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from api.schemas.common import ResponseModel, attribute
from controlplane.model import traffic

_LABEL_VALUES = {
    "sessions_by_state": traffic.SESSION_STATES,
    "not_movable": traffic.NOT_MOVABLE_REASONS,
    "login_failures": traffic.LOGIN_FAILURES,
    "connect_failures": traffic.CONNECT_FAILURES,
    "commands": traffic.COMMANDS,
    "bytes": traffic.DIRECTIONS,
    "errors": traffic.ERRORS,
}


class Latency(ResponseModel):
    """Seconds from a command to the end of its response, from a histogram; 10 means 10 or more."""

    p50: float
    p99: float


class Migrations(ResponseModel):
    """Attempts to migrate sessions away from a node."""

    moved: int
    failed: dict[str, int] = Field(description="Attempts after which the session stayed, by reason.")
    lost: int = Field(description="Sessions that a migration attempt ended.")


def _read_latency(buckets: tuple[int, ...]) -> dict[str, float | None] | None:
    quantiles = {"p50": traffic.quantile(0.5, buckets), "p99": traffic.quantile(0.99, buckets)}
    return None if None in quantiles.values() else quantiles


def _read_migrations(counts: traffic.MigrationCounts) -> dict[str, Any]:
    moved, failed, lost = (
        traffic.migrations_by_reason(counts, result)
        for result in (traffic.MOVED, traffic.FAILED, traffic.LOST)
    )
    reasons = (reason for result, reason in traffic.MIGRATION_RESULTS if result == traffic.FAILED)
    return {
        "moved": sum(moved.values()),
        "failed": {reason: failed.get(reason, 0) for reason in reasons},
        "lost": sum(lost.values()),
    }


def _counter(name: str, description: str) -> Any:
    return attribute(f"traffic.{name}", description, default=None)


class TrafficDetails(ResponseModel):
    """Traffic that the Envoys' modules report, counted since each Envoy's start; null before a report."""

    sessions_by_state: dict[str, int] | None = _counter("sessions", "Current sessions, by state.")
    not_movable: dict[str, int] | None = _counter(
        "not_movable", "Sessions that cannot migrate at the moment, by reason."
    )
    logins: int | None = _counter("logins", "Successful logins.")
    login_failures: dict[str, int] | None = _counter("login_failures", "Failed logins, by reason.")
    connect_failures: dict[str, int] | None = _counter(
        "connect_failures", "Connections to a node that failed before they were used for a client, by reason."
    )
    commands: dict[str, int] | None = _counter("commands", "Commands, by kind.")
    latency: Annotated[Latency | None, BeforeValidator(_read_latency)] = _counter(
        "recent_latency_buckets",
        "Latency of the commands in the last one to two minutes; also null without commands.",
    )
    bytes: dict[str, int] | None = _counter("bytes", "Bytes transferred, by direction.")
    errors: dict[str, int] | None = _counter("errors", "Error responses of nodes, by class.")
    migrations: Annotated[Migrations | None, BeforeValidator(_read_migrations)] = _counter(
        "migrations", "Attempts to migrate sessions from the node to another, by result."
    )

    @field_validator(*_LABEL_VALUES, mode="before")
    @classmethod
    def _add_zeros(cls, counts: traffic.Counts, info: ValidationInfo) -> dict[str, int]:
        """Add zeros for label values that were not reported."""
        return {value: counts.get(value, 0) for value in _LABEL_VALUES[str(info.field_name)]}


class EjectionDetails(ResponseModel):
    """The ejection of a node by an Envoy: after failed or lost connections, the node gets no new sessions."""

    envoy: str
    reason: Literal["connect", "closed", "error", "invalid", "tls", "vanished"]
    since: datetime


class ConfigRejectionDetails(ResponseModel):
    """A configuration that the module of an Envoy has rejected."""

    at: datetime
    extension: str
    text: str
