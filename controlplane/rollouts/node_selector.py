"""Resolves a node selector: `all`, labels or addresses. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane import address as addresses
from controlplane.errors import RolloutRefused
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan

_SELECTOR_REMEDY = "write all, or labels as name=value,name=value, or addresses as host:port,host:port"


def select_nodes(selector: str, nodes: Iterable[NodePlan]) -> tuple[str, ...]:
    """Return the selected addresses: listed addresses in the given order, otherwise sorted.

    Listed addresses may be unknown, which the preflight reports. `all` and labels select among the nodes that
    are not gone. Raises RolloutRefused if the selector is invalid or matches nothing.
    """
    parts = [part.strip() for part in selector.split(",")]
    if parts == ["all"]:
        labels: dict[str, str] = {}
    elif all("=" in part for part in parts):
        labels = dict(part.split("=", 1) for part in parts)
    else:
        return tuple(dict.fromkeys(_parse_address(part) for part in parts))
    candidates = (planned.node for planned in nodes if planned.state is not State.GONE)
    selected = sorted(node.address for node in candidates if labels.items() <= node.labels.items())
    if not selected:
        raise RolloutRefused(
            "no node was selected", [f"no node matches {selector}; `tidevoy nodes` lists the nodes"]
        )
    return tuple(selected)


def _parse_address(text: str) -> str:
    try:
        return addresses.join(*addresses.split(text))
    except ValueError as error:
        raise RolloutRefused("the node selector is invalid", [f"{error}; {_SELECTOR_REMEDY}"]) from None
