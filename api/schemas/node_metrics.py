"""What a node tells of its own load and health, as the API shows it."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import node_metrics as metrics_model


class NodeMetricsSchema(BaseModel):
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


def to_node_metrics_schema(metrics: metrics_model.NodeMetrics | None) -> NodeMetricsSchema | None:
    """Vitals as the API shows them."""
    if metrics is None:
        return None
    values = (metrics.cpu, metrics.memory, metrics.pd_failures, metrics.tikv_failures)
    at = max((reading.at for reading in values if reading is not None), default=None)
    return NodeMetricsSchema(
        cpu=_rounded_value(metrics.cpu),
        cpu_quota=metrics.cpu_quota,
        memory=_rounded_value(metrics.memory),
        pd_failures=_rounded_value(metrics.pd_failures),
        tikv_failures=_rounded_value(metrics.tikv_failures),
        at=None if at is None else utc_datetime(at),
    )


def _rounded_value(reading: metrics_model.MetricValue | None) -> float | None:
    return None if reading is None else round(reading.value, 4)
