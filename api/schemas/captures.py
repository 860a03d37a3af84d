"""Schemas of captures of the traffic of clients."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema

from api.schemas.common import OptionalText, ResponseModel, StrictRequest, attribute
from controlplane.model.capture import MAX_DURATION_SECONDS
from controlplane.model.views import CaptureState

_MAX_NAMES = 100

_NAME_PATTERN = re.compile(r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")


def _check_name(value: str) -> str:
    if _NAME_PATTERN.fullmatch(value) is None:
        raise ValueError("must have 1 to 64 letters, digits, dots, underscores or hyphens, and no dot first")
    return value


_CaptureName = Annotated[
    str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": _NAME_PATTERN.pattern})
]
_EnvoyId = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class StartCaptureRequest(StrictRequest):
    """What is captured, and for how long."""

    name: _CaptureName | None = Field(
        None, description="Name of its directory; default: the time in UTC, such as `20261128T160405`."
    )
    duration_seconds: float = Field(
        3600.0, ge=1, le=MAX_DURATION_SECONDS, allow_inf_nan=False, description="It ends after this time."
    )
    envoys: list[_EnvoyId] = Field(
        default=[], max_length=_MAX_NAMES, description="Ids of the Envoys that capture; empty: all."
    )
    users: list[_Name] = Field(
        default=[], max_length=_MAX_NAMES, description="Users whose sessions are captured; empty: all."
    )
    groups: list[_Name] = Field(
        default=[],
        max_length=_MAX_NAMES,
        description="Groups of nodes whose sessions are captured; empty: all.",
    )


class CaptureDetails(ResponseModel):
    """The running or last capture, as it was started."""

    name: str
    started_at: datetime
    until: datetime = Field(description="When it ends by itself.")
    envoys: list[str] = Field(description="Ids of the Envoys that capture; empty: all.")
    users: list[str] = Field(description="Users whose sessions are captured; empty: all.")
    groups: list[str] = Field(description="Groups of nodes whose sessions are captured; empty: all.")


class EnvoyCaptureDetails(ResponseModel):
    """What one Envoy has captured. Counts begin with the capture or, later, with the Envoy process."""

    envoy: str = Field(description="Id of the Envoy.")
    active: bool = attribute("counts.is_active", "Whether it captures at present.", default=False)
    records: int | None = attribute(
        "counts.records", "Records written; null: it has not reported this capture.", default=None
    )
    dropped: int | None = attribute(
        "counts.dropped",
        "Records that are missing: the disk was slow or full, a request was too long or had query attributes"
        " that the format has no place for, or the session ended before the command.",
        default=None,
    )
    filtered: int | None = attribute(
        "counts.filtered", "Statements that were left out, because they hold secrets.", default=None
    )
    bytes: int | None = attribute("counts.bytes", "Bytes of its files.", default=None)
    write_errors: int | None = attribute("counts.write_errors", "Failed attempts to write.", default=None)
    sessions_waiting: int | None = attribute(
        "counts.waiting",
        "Open sessions of which nothing is captured yet, because their nodes have not exported their states.",
        default=None,
    )
    problem: OptionalText = Field(description="Why it cannot capture; null: it can.")


class CaptureStatus(ResponseModel):
    """The running or last capture, and what the Envoys report of it."""

    state: CaptureState = Field(description="`none`: there was no capture. `ended`: the last one has ended.")
    capture: CaptureDetails | None
    ended_at: datetime | None = Field(description="Null: it is running, or there was none.")
    directory: OptionalText = Field(
        description="Its directory on the machines of the Envoys; null: there is none, or captures are off."
    )
    envoys: list[EnvoyCaptureDetails] = Field(description="The Envoys that capture, or have reported it.")
