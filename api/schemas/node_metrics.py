"""Schema of the load and health metrics that a node reports."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import node_metrics as metrics_model


class NodeMetricsSchema(BaseModel):
    """The last known values, as ratios unless noted otherwise; null: unknown, which is neither 0 nor 1."""

    cpu: float | None = Field(description="CPU usage, as a fraction of the CPU quota.")
    cpu_quota: float | None = Field(description="CPU quota in cores.")
    memory: float | None = Field(description="Memory usage, as a fraction of the memory limit.")
    pd_failures: float | None = Field(
        description="Ratio of failed to successful requests to PD in two minutes."
    )
    tikv_failures: float | None = Field(
        description="Ratio of failures to requests to TiKV in two minutes; may exceed 1."
    )
    at: datetime | None = Field(description="Time of the newest of these values.")


def to_node_metrics_schema(metrics: metrics_model.NodeMetrics | None) -> NodeMetricsSchema | None:
    """Convert node metrics to their schema."""
    if metrics is None:
        return None
    values = (metrics.cpu, metrics.memory, metrics.pd_failures, metrics.tikv_failures)
    at = max((value.at for value in values if value is not None), default=None)
    return NodeMetricsSchema(
        cpu=_rounded_value(metrics.cpu),
        cpu_quota=metrics.cpu_quota,
        memory=_rounded_value(metrics.memory),
        pd_failures=_rounded_value(metrics.pd_failures),
        tikv_failures=_rounded_value(metrics.tikv_failures),
        at=None if at is None else utc_datetime(at),
    )


def _rounded_value(value: metrics_model.MetricValue | None) -> float | None:
    return None if value is None else round(value.value, 4)
