"""Times as the API shows them."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_datetime(timestamp: float) -> datetime:
    """Unix seconds as a date in UTC."""
    return datetime.fromtimestamp(timestamp, UTC)
