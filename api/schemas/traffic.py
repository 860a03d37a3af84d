"""Schemas of the traffic that Envoys' modules report, per node and per Envoy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import traffic as traffic_model


class Latency(BaseModel):
    """Seconds from a command to the end of its response, interpolated in a bucket; 10 means 10 or more."""

    p50: float
    p99: float


class Migrations(BaseModel):
    """Attempts to migrate sessions away from a node."""

    moved: int
    stayed: dict[str, int] = Field(description="Failed attempts, after which the session stayed, by reason.")
    lost: int = Field(description="Sessions that a migration attempt ended.")


class TrafficSchema(BaseModel):
    """Traffic reported by the Envoys' modules, counted since each Envoy's start; null: no report yet."""

    sessions_by_state: dict[str, int] | None = Field(description="Current sessions, by state.")
    pinned: dict[str, int] | None = Field(
        description="Sessions that cannot migrate at the moment, by reason."
    )
    logins: int | None = Field(description="Successful logins.")
    login_failures: dict[str, int] | None = Field(description="Failed logins, by reason.")
    connect_failures: dict[str, int] | None = Field(
        description="Connections to a node that failed before they were used for a client, by reason."
    )
    commands: dict[str, int] | None = Field(description="Commands, by kind.")
    latency: Latency | None = Field(
        description="Latency of the commands in the last one to two minutes; also null without commands."
    )
    bytes: dict[str, int] | None = Field(description="Bytes transferred, by direction.")
    errors: dict[str, int] | None = Field(description="Error responses of nodes, by class.")
    migrations: Migrations | None = Field(
        description="Attempts to migrate sessions from the node to another, by result."
    )


class EjectionSchema(BaseModel):
    """An Envoy's ejection of a node whose connections failed or were lost; it sends it no new sessions."""

    envoy: str
    reason: Literal["connect", "closed", "error", "invalid", "tls", "vanished"]
    since: datetime


class ConfigRejectionSchema(BaseModel):
    """A configuration that the module of an Envoy has rejected."""

    at: datetime
    extension: str
    text: str


def to_traffic_fields(traffic: traffic_model.Traffic | None) -> dict[str, Any]:
    """Return the fields of `TrafficSchema`, with zeros for names that were not reported."""
    if traffic is None:
        return dict.fromkeys(TrafficSchema.model_fields)
    return {
        "sessions_by_state": _with_zeros(traffic_model.SESSION_STATES, traffic.sessions),
        "pinned": _with_zeros(traffic_model.NOT_MOVABLE_REASONS, traffic.not_movable),
        "logins": traffic.logins,
        "login_failures": _with_zeros(traffic_model.LOGIN_FAILURES, traffic.login_failures),
        "connect_failures": _with_zeros(traffic_model.CONNECT_FAILURES, traffic.connect_failures),
        "commands": _with_zeros(traffic_model.COMMANDS, traffic.commands),
        "latency": _to_latency(traffic.recent_latency_buckets),
        "bytes": _with_zeros(traffic_model.DIRECTIONS, traffic.bytes),
        "errors": _with_zeros(traffic_model.ERRORS, traffic.errors),
        "migrations": _to_migrations(traffic.migrations),
    }


def _to_migrations(counts: traffic_model.MigrationCounts) -> Migrations:
    failure_reasons = [
        reason for result, reason in traffic_model.MIGRATION_RESULTS if result == traffic_model.FAILED
    ]
    return Migrations(
        moved=sum(traffic_model.migrations_by_reason(counts, traffic_model.MOVED).values()),
        stayed=_with_zeros(failure_reasons, traffic_model.migrations_by_reason(counts, traffic_model.FAILED)),
        lost=sum(traffic_model.migrations_by_reason(counts, traffic_model.LOST).values()),
    )


def _to_latency(buckets: tuple[int, ...]) -> Latency | None:
    p50, p99 = traffic_model.quantile(0.5, buckets), traffic_model.quantile(0.99, buckets)
    return None if p50 is None or p99 is None else Latency(p50=p50, p99=p99)


def _with_zeros(names: Iterable[str], counts: traffic_model.Counts) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in names}


def to_ejection_schema(ejection: traffic_model.Ejection) -> EjectionSchema:
    """Convert an ejection to its schema."""
    return EjectionSchema.model_validate(
        {"envoy": ejection.envoy, "reason": ejection.reason, "since": utc_datetime(ejection.since)}
    )


def to_config_rejection_schema(
    rejection: traffic_model.ConfigRejection | None,
) -> ConfigRejectionSchema | None:
    """Convert a configuration rejection to its schema."""
    if rejection is None:
        return None
    return ConfigRejectionSchema(
        at=utc_datetime(rejection.at), extension=rejection.extension, text=rejection.text
    )
