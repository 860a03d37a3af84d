"""Determines which host names to resolve and which ports of the nodes to check. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane import address as addresses
from controlplane.model.facts import Facts
from controlplane.model.nodes import Node
from controlplane.model.plan import Plan
from controlplane.observe.health.health_checker import CheckTarget


def host_names(nodes: Iterable[Node]) -> set[str]:
    """Return the host names (not literal IPs) of all SQL and status addresses."""
    hosts = set()
    for node in nodes:
        for address in (node.address, node.status_address):
            if address is not None:
                host = addresses.split(address)[0]
                if addresses.literal_ip(host) is None:
                    hosts.add(host)
    return hosts


def build_check_targets(nodes: Iterable[Node], plan: Plan, facts: Facts) -> Mapping[str, CheckTarget]:
    """Return the check targets by node address, except for nodes without a known IP."""
    check_targets = {}
    for node in nodes:
        planned = plan.nodes.get(node.address)
        sql_endpoint = planned.endpoint if planned is not None else None
        sql_endpoint = sql_endpoint or _resolved_endpoint(node.address, facts)
        if sql_endpoint is None:
            continue
        status_endpoint, status_host = None, ""
        if node.status_address is not None:
            status_endpoint = _resolved_endpoint(node.status_address, facts)
            status_host = addresses.split(node.status_address)[0]
        check_targets[node.address] = CheckTarget(
            node.address, sql_endpoint=sql_endpoint, status_endpoint=status_endpoint, status_host=status_host
        )
    return check_targets


def _resolved_endpoint(address: str, facts: Facts) -> str | None:
    host, port = addresses.split(address)
    ip = addresses.literal_ip(host)
    if ip is None:
        resolution = facts.resolutions.get(host)
        ip = resolution.ip if resolution is not None else None
    return addresses.join(ip, port) if ip is not None else None
