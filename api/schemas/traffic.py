"""What the modules in Envoys tell of the traffic, as the API shows it: of a node, and of an Envoy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from api.schemas.common import moment
from controlplane.model import traffic as words


class Latency(BaseModel):
    """Seconds from a command to the end of its response, guessed within a bucket; 10 stands for more too."""

    p50: float
    p99: float


class Migrations(BaseModel):
    """Tries to move sessions away from a node."""

    moved: int
    stayed: dict[str, int] = Field(description="Sessions that stayed where they were, by why.")
    lost: int = Field(description="Sessions that ended because of it.")


class Traffic(BaseModel):
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


class Ejection(BaseModel):
    """An Envoy has ejected a node: it could not use the node, or lost it, and sends it no new sessions."""

    envoy: str
    reason: Literal["connect", "closed", "error", "invalid", "tls", "vanished"]
    since: datetime


class Refusal(BaseModel):
    """A configuration that the module in an Envoy would not take."""

    at: datetime
    extension: str
    text: str


def traffic(told: words.Traffic | None) -> dict[str, Any]:
    """The fields of `Traffic`, every word of the module among them."""
    if told is None:
        return dict.fromkeys(Traffic.model_fields)
    return {
        "sessions_by_state": _all(words.STATES, told.sessions),
        "pinned": _all(words.PIN_REASONS, told.pinned),
        "logins": told.logins,
        "login_failures": _all(words.LOGIN_FAILURES, told.login_failures),
        "connect_failures": _all(words.CONNECT_FAILURES, told.connect_failures),
        "commands": _all(words.COMMANDS, told.commands),
        "latency": _latency(told.recent),
        "bytes": _all(words.DIRECTIONS, told.bytes),
        "errors": _all(words.ERRORS, told.errors),
        "migrations": _migrations(told.moves),
    }


def _migrations(moves: words.Moves) -> Migrations:
    stayed = [why for result, why in words.MOVES if result == words.STAYED]
    return Migrations(
        moved=sum(words.moves_by_reason(moves, words.MOVED).values()),
        stayed=_all(stayed, words.moves_by_reason(moves, words.STAYED)),
        lost=sum(words.moves_by_reason(moves, words.LOST).values()),
    )


def _latency(buckets: tuple[int, ...]) -> Latency | None:
    p50, p99 = words.quantile(0.5, buckets), words.quantile(0.99, buckets)
    return None if p50 is None or p99 is None else Latency(p50=p50, p99=p99)


def _all(known: Iterable[str], counts: words.Counts) -> dict[str, int]:
    return {word: counts.get(word, 0) for word in known}


def ejection(known: words.Ejection) -> Ejection:
    """An ejection as the API shows it."""
    return Ejection.model_validate(
        {"envoy": known.envoy, "reason": known.reason, "since": moment(known.since)}
    )


def refusal(refused: words.Refusal | None) -> Refusal | None:
    """A refusal as the API shows it."""
    if refused is None:
        return None
    return Refusal(at=moment(refused.at), extension=refused.extension, text=refused.text)
