"""The error of a release that cannot be built."""

from __future__ import annotations


class ReleaseError(Exception):
    """A release cannot be built; the message says why and what to do."""
