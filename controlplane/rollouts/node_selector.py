"""Which nodes an operator means by `all`, by labels or by addresses. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane import address as addresses
from controlplane.errors import RolloutRefused
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan

_SELECTOR_REMEDY = "write all, or labels as name=value,name=value, or addresses as host:port,host:port"


def select_nodes(selector: str, nodes: Iterable[NodePlan]) -> tuple[str, ...]:
    """The addresses that are meant: by themselves in the order given, else by address. RolloutRefused.

    Addresses need not be known, for the checks tell of those that are not. `all` and labels choose among the
    nodes that do not leave.
    """
    parts = [part.strip() for part in selector.split(",")]
    if parts == ["all"]:
        labels: dict[str, str] = {}
    elif all("=" in part for part in parts):
        labels = dict(part.split("=", 1) for part in parts)
    else:
        return tuple(dict.fromkeys(_parse_address(part) for part in parts))
    candidates = (planned.node for planned in nodes if planned.state is not State.GONE)
    chosen = sorted(node.address for node in candidates if labels.items() <= node.labels.items())
    if not chosen:
        raise RolloutRefused(
            "no node was chosen", [f"no node fits {selector}; `tidevoy nodes` lists what there is"]
        )
    return tuple(chosen)


def _parse_address(text: str) -> str:
    try:
        return addresses.join(*addresses.split(text))
    except ValueError as error:
        raise RolloutRefused("the nodes cannot be chosen", [f"{error}; {_SELECTOR_REMEDY}"]) from None
