"""From nodes to what has to be looked at: the names to resolve and the ports to check. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane import address as addresses
from controlplane.model.facts import Facts
from controlplane.model.nodes import Node
from controlplane.model.plan import Plan
from controlplane.observe.health.health_checker import CheckTarget


def host_names(nodes: Iterable[Node]) -> set[str]:
    """Host names, not literal IPs, of all SQL and status addresses."""
    hosts = set()
    for node in nodes:
        for address in (node.address, node.status_address):
            if address is not None:
                host = addresses.split(address)[0]
                if addresses.literal_ip(host) is None:
                    hosts.add(host)
    return hosts


def build_check_targets(nodes: Iterable[Node], plan: Plan, facts: Facts) -> Mapping[str, CheckTarget]:
    """What to check, by node address. Nodes whose name has never resolved are left out."""
    found = {}
    for node in nodes:
        planned = plan.nodes.get(node.address)
        sql = planned.endpoint if planned is not None else None
        sql = sql or _resolved_endpoint(node.address, facts)
        if sql is None:
            continue
        status = _resolved_endpoint(node.status_address, facts) if node.status_address is not None else None
        host = addresses.split(node.status_address)[0] if node.status_address is not None else ""
        found[node.address] = CheckTarget(
            address=node.address, sql_endpoint=sql, status_endpoint=status, status_host=host
        )
    return found


def _resolved_endpoint(address: str, facts: Facts) -> str | None:
    host, port = addresses.split(address)
    ip = addresses.literal_ip(host)
    if ip is None:
        resolution = facts.resolutions.get(host)
        ip = resolution.ip if resolution is not None else None
    return addresses.join(ip, port) if ip is not None else None
