"""What Tidevoy's module gets while its Envoy runs: limits of sessions, and what is said of nodes. Pure.

It is the configuration of a listener filter of the module, by extension config discovery (ECDS): the module
reads it on Envoy's main thread, and publishes it to the workers as a whole
(docs/decisions/0014-nodes-come-to-the-module-by-ecds.md). Endpoints (EDS) say where nodes are and with which
weight, and keep new sessions off a node on their own; this says which nodes sessions are to leave.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from envoy.config.core.v3 import extension_pb2

from controlplane.config import Settings
from controlplane.model import NodePlan, Plan
from controlplane.publish import module
from controlplane.publish.packed import serialise
from controlplane.version import VERSION


def live_config(plan: Plan, nodes: Sequence[NodePlan], settings: Settings, group: str, name: str) -> bytes:
    """Serialised `core.v3.TypedExtensionConfig`, called `name`: of the nodes of a group, in this order."""
    said = ",".join(_node_info_of(node, plan) for node in nodes)
    sql = settings.sql
    limits = {"group": group, "login_timeout": sql.login_timeout, "idle_timeout": sql.idle_timeout}
    # The nodes are joined as text: thousands of them are the same from one plan to the next.
    published = f'{json.dumps(limits)[:-1]}, "nodes": [{said}]}}'
    text = f'{{"version": {json.dumps(VERSION)}, "published": {published}}}'
    return serialise(extension_pb2.TypedExtensionConfig(name=name, typed_config=module.live_config(text)))


def _node_info_of(node: NodePlan, plan: Plan) -> str:
    assert node.endpoint is not None
    address, asked = node.node.address, plan.rebalance
    return _node_info(
        node.endpoint,
        address,
        node.state.value,
        node.version,
        node.closing,
        _counted(asked.round, asked.moves.get(address)),
        _counted(asked.round, asked.wants.get(address)),
    )


def _counted(number: int, sessions: Mapping[str, int] | None) -> str:
    """`ROUND:INSTANCE=COUNT,...`: how many sessions each Envoy is to move, in which round; empty: none."""
    if not sessions:
        return ""
    return f"{number}:" + ",".join(f"{envoy}={count}" for envoy, count in sorted(sessions.items()))


@lru_cache(maxsize=32_768)
def _node_info(
    endpoint: str, address: str, state: str, version: str, closing: bool, moves: str, wants: str
) -> str:
    info: dict[str, Any] = {"endpoint": endpoint, "address": address, "state": state}
    # What is not known, or not so, has no key.
    told = (("version", version), ("close", closing), ("moves", moves), ("wants", wants))
    return json.dumps(info | {key: value for key, value in told if value}, separators=(",", ":"))
