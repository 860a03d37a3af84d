"""Conversion of times for the REST API."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_datetime(timestamp: float) -> datetime:
    """Convert Unix seconds to a datetime in UTC."""
    return datetime.fromtimestamp(timestamp, UTC)
