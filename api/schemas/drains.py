"""What becomes of the sessions of a node that is being left, as the API shows it."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from api.schemas.common import utc_datetime
from controlplane.model import views


class DrainProgressSchema(BaseModel):
    """What has come of the sessions of a node since it is being left, as Envoys with the module tell."""

    since: datetime
    left: int | None = Field(description="Sessions that are still there; null: not known.")
    moved: int = Field(description="Sessions that have moved to other nodes.")
    failed: dict[str, int] = Field(
        description="Tries to move a session after which it stayed, by why; each may be tried again."
    )
    lost: int = Field(description="Sessions that ended because of a try to move them.")
    not_movable: dict[str, int] = Field(description="Sessions that cannot move now, by why.")
    seconds_left: float | None = Field(
        description="How long those that can move will take at the pace so far; null: it cannot be told."
    )


def to_drain_progress_schema(progress: views.DrainProgress | None) -> DrainProgressSchema | None:
    """A departure as the API shows it."""
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
