"""Intents: the requests of operators that are in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.capture import Capture
from controlplane.model.module_switches import SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rules import StatementRule


class OnDeadline(StrEnum):
    """What happens to sessions that remain when the deadline of a drain passes."""

    KEEP = "keep"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class DrainIntent:
    """A request to empty a node."""

    since: float
    deadline_seconds: float
    on_deadline: OnDeadline = OnDeadline.KEEP
    owner: str = ""  # id of the rollout that requested the drain; empty: an operator did


@dataclass(frozen=True, slots=True)
class AddedNode:
    """A node that an operator added through the API."""

    address: str
    status_address: str | None = None
    weight: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)


@dataclass(frozen=True, slots=True)
class Intents:
    """All requests that are in force. `removed` and `ended_envoys` contain the times of the requests."""

    added: Mapping[str, AddedNode] = field(default_factory=lambda: EMPTY_MAP)
    removed: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # by address
    drains: Mapping[str, DrainIntent] = field(default_factory=lambda: EMPTY_MAP)
    weights: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: EMPTY_MAP)
    ended_envoys: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    switch_overrides: Mapping[str, SwitchOverrides] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    rules: tuple[StatementRule, ...] = ()  # in their order
    capture: Capture | None = None  # the running or the last capture
