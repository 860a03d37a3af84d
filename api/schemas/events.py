"""Schemas of the event stream."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import Header
from pydantic import Field, WithJsonSchema

from api.schemas.common import ResponseModel, StrictQuery

_MAX_EVENT_ID = 2**63 - 1
LastEventId = Annotated[
    int | None,
    Header(ge=0, le=_MAX_EVENT_ID),
    # A header is present or absent; it cannot be null.
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": _MAX_EVENT_ID}),
]


class EventsQuery(StrictQuery):
    """The query of the event stream."""

    follow: bool = Field(
        True, description="Whether the stream continues with new events, or ends after the stored ones."
    )


class EventDetails(ResponseModel):
    """One event, as the `data` of a server-sent event."""

    id: int
    at: datetime
    kind: str
    subject: str
    message: str
    data: dict[str, Any]
