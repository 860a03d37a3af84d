"""Paths of the pages about one node or one rollout."""

from __future__ import annotations

from urllib.parse import quote


def node(address: str) -> str:
    """Return the path of a node's page; its forms are below this path."""
    return f"/console/nodes/{quote(address, safe=':[]')}"


def rollout(name: str) -> str:
    """Return the path of a rollout's page; its forms are below this path."""
    return f"/console/rollouts/{quote(name, safe='')}"
