"""What a recycle knows and is asked for: frozen data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DeadlineAction = Literal["keep", "cut"]


@dataclass(frozen=True, slots=True)
class EnvoyState:
    """An Envoy as its admin port tells of it."""

    id: str
    version: str
    is_live: bool  # it has its first configuration
    uptime_seconds: float  # seconds
    listeners: Mapping[str, str]  # name -> `ip:port`
    has_stopped_accepting: bool  # it was told to accept nobody any more, which it never takes back
    sessions: int  # connections of clients, also such as are not yet, or only on their way to a node


@dataclass(frozen=True, slots=True)
class RegisteredEnvoy:
    """An Envoy as the control plane tells of it."""

    id: str
    is_connected: bool
    acked_version: str  # version of what it runs; empty: it has told of nothing
    published_version: str  # version of what it is to run; empty: there is nothing yet
    filter: str
    group: str = ""
    problems: tuple[str, ...] = ()  # what is wrong with the Envoy that is connected now, as clauses
    stale_resources: tuple[str, ...] = ()  # what it runs in an older form than an Envoy that starts now


@dataclass(frozen=True, slots=True)
class ReplacementSpec:
    """What to do. Admin ports are `host:port`; commands are lists of arguments; times are seconds."""

    old_admin: str
    new_admin: str
    start_command: tuple[str, ...] = ()  # starts the new one; empty: somebody else does
    undo_command: tuple[str, ...] = ()  # ends it again when it is of no use
    stop_command: tuple[str, ...] = ()  # ends the old one; empty: its admin port is told to
    start_timeout: float = 60.0
    deadline: float = 3600.0
    on_deadline: DeadlineAction = "keep"
    optional_listeners: frozenset[str] = (
        frozenset()
    )  # listeners of the old one that the new one need not have


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """One line of progress. `step` is one of check, start, ready, close, watch, end, forget, done."""

    step: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
