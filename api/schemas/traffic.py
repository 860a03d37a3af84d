"""What the modules in Envoys tell of the traffic, as the API shows it: of a node, and of an Envoy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import traffic as traffic_model


class Latency(BaseModel):
    """Seconds from a command to the end of its response, guessed within a bucket; 10 stands for more too."""

    p50: float
    p99: float


class Migrations(BaseModel):
    """Tries to move sessions away from a node."""

    moved: int
    stayed: dict[str, int] = Field(description="Sessions that stayed where they were, by why.")
    lost: int = Field(description="Sessions that ended because of it.")


class TrafficSchema(BaseModel):
    """What the modules in the Envoys tell, each since its Envoy started; null: none has told anything yet."""

    sessions_by_state: dict[str, int] | None = Field(description="What sessions are doing now.")
    pinned: dict[str, int] | None = Field(description="Sessions that cannot be moved now, by why.")
    logins: int | None = Field(description="Logins that succeeded.")
    login_failures: dict[str, int] | None = Field(description="Logins that failed, by why.")
    connect_failures: dict[str, int] | None = Field(
        description="Connections to a node that came to nothing before a client saw them, by why."
    )
    commands: dict[str, int] | None = Field(description="Commands by kind.")
    latency: Latency | None = Field(
        description="Of the commands of the last one to two minutes; null when there were none, too."
    )
    bytes: dict[str, int] | None = Field(description="Bytes carried, by direction.")
    errors: dict[str, int] | None = Field(description="Errors that nodes answered, by class.")
    migrations: Migrations | None = Field(
        description="Tries to move sessions from the node to another, by how they ended."
    )


class EjectionSchema(BaseModel):
    """An Envoy has ejected a node: it could not use the node, or lost it, and sends it no new sessions."""

    envoy: str
    reason: Literal["connect", "closed", "error", "invalid", "tls", "vanished"]
    since: datetime


class ConfigRejectionSchema(BaseModel):
    """A configuration that the module in an Envoy would not take."""

    at: datetime
    extension: str
    text: str


def to_traffic_fields(traffic: traffic_model.Traffic | None) -> dict[str, Any]:
    """The fields of `Traffic`, every word of the module among them."""
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


def _to_migrations(moves: traffic_model.MigrationCounts) -> Migrations:
    failure_reasons = [
        why for result, why in traffic_model.MIGRATION_RESULTS if result == traffic_model.FAILED
    ]
    return Migrations(
        moved=sum(traffic_model.migrations_by_reason(moves, traffic_model.MOVED).values()),
        stayed=_with_zeros(failure_reasons, traffic_model.migrations_by_reason(moves, traffic_model.FAILED)),
        lost=sum(traffic_model.migrations_by_reason(moves, traffic_model.LOST).values()),
    )


def _to_latency(buckets: tuple[int, ...]) -> Latency | None:
    p50, p99 = traffic_model.quantile(0.5, buckets), traffic_model.quantile(0.99, buckets)
    return None if p50 is None or p99 is None else Latency(p50=p50, p99=p99)


def _with_zeros(names: Iterable[str], counts: traffic_model.Counts) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in names}


def to_ejection_schema(ejection: traffic_model.Ejection) -> EjectionSchema:
    """An ejection as the API shows it."""
    return EjectionSchema.model_validate(
        {"envoy": ejection.envoy, "reason": ejection.reason, "since": utc_datetime(ejection.since)}
    )


def to_config_rejection_schema(
    rejection: traffic_model.ConfigRejection | None,
) -> ConfigRejectionSchema | None:
    """A refusal as the API shows it."""
    if rejection is None:
        return None
    return ConfigRejectionSchema(
        at=utc_datetime(rejection.at), extension=rejection.extension, text=rejection.text
    )
