"""Decide whether the NetworkPolicies of a rendered chart let a connection pass."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.kubernetes.rendered_chart import NAMESPACE, Labels, PodTemplate, RenderedChart, is_selected


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connects: a Pod, or an address outside of the cluster."""

    labels: Labels | None = None
    namespace: str = NAMESPACE
    address: str = "192.0.2.1"


def is_allowed(chart: RenderedChart, peer: Peer, target: PodTemplate, port: str) -> bool:
    """Return whether `peer` may connect to a named port of `target`. A Pod without a policy is open."""
    policies = [
        each["spec"]
        for each in chart.of_kind("NetworkPolicy")
        if is_selected(each["spec"]["podSelector"]["matchLabels"], target.labels)
    ]
    return not policies or any(
        _has_port(rule, target, port) and _has_peer(rule, peer)
        for policy in policies
        for rule in policy["ingress"]
    )


def _has_port(rule: Mapping[str, Any], target: PodTemplate, port: str) -> bool:
    names = [each["port"] for each in rule["ports"]]
    assert all(name in target.ports for name in names), f"{target.owner} has none of the ports {names}"
    return port in names


def _has_peer(rule: Mapping[str, Any], peer: Peer) -> bool:
    # A rule without `from` allows everybody. So does an empty list, which no rule may have by accident.
    assert rule.get("from") != []
    return "from" not in rule or any(_is_peer(each, peer) for each in rule["from"])


def _is_peer(allowed: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in allowed:
        network = ipaddress.ip_network(allowed["ipBlock"]["cidr"])
        return peer.labels is None and ipaddress.ip_address(peer.address) in network
    if peer.labels is None:
        return False
    namespaces = allowed.get("namespaceSelector")
    if namespaces is None:
        is_in_namespace = peer.namespace == NAMESPACE
    else:
        labels = {"kubernetes.io/metadata.name": peer.namespace}
        is_in_namespace = is_selected(namespaces.get("matchLabels", {}), labels)
    return is_in_namespace and is_selected(allowed.get("podSelector", {}).get("matchLabels", {}), peer.labels)
