"""The paths of pages that are about one thing."""

from __future__ import annotations

from urllib.parse import quote


def node(address: str) -> str:
    """A node's page; its forms are below it."""
    return f"/console/nodes/{quote(address, safe=':[]')}"


def rollout(name: str) -> str:
    """A rollout's page; its forms are below it."""
    return f"/console/rollouts/{quote(name, safe='')}"
