"""Times as the API shows them."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(at: float) -> datetime:
    """Unix seconds as a date in UTC."""
    return datetime.fromtimestamp(at, UTC)
