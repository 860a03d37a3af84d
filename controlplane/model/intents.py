"""What operators asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.nodes import EMPTY_MAP


class OnDeadline(StrEnum):
    """What happens to sessions that are left when a drain's deadline comes."""

    KEEP = "keep"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class DrainIntent:
    """A node that an operator wants empty."""

    since: float
    deadline_seconds: float
    on_deadline: OnDeadline = OnDeadline.KEEP
    owner: str = ""  # the id of the rollout that asked for it; empty: an operator did


@dataclass(frozen=True, slots=True)
class AddedNode:
    """A node that an operator added by hand."""

    address: str
    status_address: str | None = None
    weight: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)


@dataclass(frozen=True, slots=True)
class Intents:
    """All that operators asked for and have not taken back."""

    added: Mapping[str, AddedNode] = field(default_factory=lambda: EMPTY_MAP)
    removed: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # address -> since when
    drains: Mapping[str, DrainIntent] = field(default_factory=lambda: EMPTY_MAP)
    weights: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: EMPTY_MAP)
    ended_envoys: Mapping[str, float] = field(
        default_factory=lambda: EMPTY_MAP
    )  # id of an Envoy -> since when
