"""The event type of the event log and of `GET /v1/events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.model.nodes import EMPTY_MAP


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event log, as shown by `GET /v1/events`.

    `kind` is dotted (`node.state`, `envoy.nack`); `subject` is a node address, an Envoy id or a key.
    """

    id: int
    at: float
    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = field(default_factory=lambda: EMPTY_MAP)
