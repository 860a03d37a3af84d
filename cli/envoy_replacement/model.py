"""Data of an Envoy replacement: its specification, the Envoys' states and progress messages. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DeadlineAction = Literal["keep", "cut"]


@dataclass(frozen=True, slots=True)
class EnvoyState:
    """An Envoy as its admin port reports it."""

    id: str
    version: str
    is_live: bool  # it has its first configuration
    uptime_seconds: float
    listeners: Mapping[str, str]  # name -> `ip:port`
    has_stopped_accepting: bool  # it accepts no more connections; irreversible in one process
    sessions: int  # client connections, including those that have no node yet


@dataclass(frozen=True, slots=True)
class RegisteredEnvoy:
    """An Envoy as the control plane reports it."""

    id: str
    is_connected: bool
    acked_version: str  # version that it runs; empty: it has acknowledged nothing
    published_version: str  # version that it should run; empty: nothing is published yet
    filter: str
    group: str = ""
    problems: tuple[str, ...] = ()  # problems of the Envoy that is connected now, as clauses
    stale_resources: tuple[str, ...] = ()  # resources that are older than those of an Envoy that starts now


@dataclass(frozen=True, slots=True)
class ReplacementSpec:
    """Which Envoy replaces which, and how. Admin ports are `host:port`; times are in seconds."""

    old_admin: str
    new_admin: str
    start_command: tuple[str, ...] = ()  # starts the new Envoy; empty: the operator starts it
    undo_command: tuple[str, ...] = ()  # stops the new Envoy if it cannot take over
    stop_command: tuple[str, ...] = ()  # stops the old Envoy; empty: use its admin port
    start_timeout: float = 60.0
    deadline: float = 3600.0
    on_deadline: DeadlineAction = "keep"
    # Listeners of the old Envoy that the new one does not need.
    optional_listeners: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """One line of progress. `step` is one of check, start, ready, close, watch, end, forget, done."""

    step: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
