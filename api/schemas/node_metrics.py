"""What a node tells of its own load and health, as the API shows it."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import moment
from controlplane.model import node_metrics as words


class Vitals(BaseModel):
    """Ratios as last read; null: not known, which is neither 0 nor full."""

    cpu: float | None = Field(description="CPU that it uses, of what it may use.")
    cpu_quota: float | None = Field(description="Cores that it may use.")
    memory: float | None = Field(description="Memory that it uses, of what it may use.")
    pd_failures: float | None = Field(
        description="Requests to PD that failed, by those that did not, in two minutes."
    )
    tikv_failures: float | None = Field(
        description="Failures of requests to TiKV, by requests, in two minutes; may exceed 1."
    )
    at: datetime | None = Field(description="As of when the newest of them was true.")


def vitals(known: words.Vitals | None) -> Vitals | None:
    """Vitals as the API shows them."""
    if known is None:
        return None
    readings = (known.cpu, known.memory, known.pd_failures, known.tikv_failures)
    at = max((reading.at for reading in readings if reading is not None), default=None)
    return Vitals(
        cpu=_value(known.cpu),
        cpu_quota=known.cpu_quota,
        memory=_value(known.memory),
        pd_failures=_value(known.pd_failures),
        tikv_failures=_value(known.tikv_failures),
        at=None if at is None else moment(at),
    )


def _value(reading: words.Reading | None) -> float | None:
    return None if reading is None else round(reading.value, 4)
