"""Schema of the drain progress of a node."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import views


class DrainProgressSchema(BaseModel):
    """Drain progress of a node's sessions since the drain or removal started, from Envoys with the module."""

    since: datetime
    left: int | None = Field(description="Sessions that are still on the node; null: unknown.")
    moved: int = Field(description="Sessions that have migrated to other nodes.")
    failed: dict[str, int] = Field(
        description="Migration attempts after which the session stayed, by reason; may be retried."
    )
    lost: int = Field(description="Sessions that a migration attempt ended.")
    not_movable: dict[str, int] = Field(description="Sessions that cannot migrate at the moment, by reason.")
    seconds_left: float | None = Field(
        description="Estimated seconds until all movable sessions have migrated; null: unknown."
    )


def to_drain_progress_schema(progress: views.DrainProgress | None) -> DrainProgressSchema | None:
    """Convert a drain progress to its schema."""
    if progress is None:
        return None
    return DrainProgressSchema(
        since=utc_datetime(progress.since),
        left=progress.sessions_left,
        moved=progress.moved,
        failed=dict(progress.failed),
        lost=progress.lost,
        not_movable=dict(progress.not_movable),
        seconds_left=None if progress.seconds_left is None else round(progress.seconds_left, 3),
    )
