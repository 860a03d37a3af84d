"""Parts of messages."""

from __future__ import annotations

from collections.abc import Sequence


def some_of(names: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Return the first names, at most `limit`, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{separator.join(names[:limit])}{more}"
