"""Count the sessions of a node, and decide whether it is confirmed empty. No I/O.

Two sources report the sessions of an Envoy. Its module, once it has served a session, counts each session at
its current node. Load reports, which every Envoy sends, keep counting a session at its first node; so they
are used only where there is no module or where the module has never had a session, and none can have
migrated (docs/internals/decisions/0007-the-module-reports-session-counts.md).
"""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.nodes import EMPTY_MAP, NodeKey, State
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import SessionCounts

# Seconds until a count of the module appears in the stats of its Envoy.
COUNT_DELAY_SECONDS = 1.0


def reported(address: str, endpoint: str | None, facts: Facts) -> int:
    """Return the sessions of all Envoys that are reported on a node."""
    return facts.sessions_by_address.get(address, 0) + facts.sessions_by_endpoint.get(endpoint or "", 0)


def session_count(address: str, endpoint: str | None, facts: Facts) -> int | None:
    """Return the sessions of all Envoys on a node, or None while no Envoy has reported anything."""
    if endpoint is None or not (facts.loads or facts.session_counts):
        return None
    return reported(address, endpoint, facts)


def for_envoy(envoy: str, facts: Facts) -> int | None:
    """Return the sessions of an Envoy on all nodes, or None while it has reported nothing."""
    source = _session_source(envoy, facts)
    if isinstance(source, SessionCounts):
        return sum(source.sessions.values())
    return sum(source.sessions.values()) if source is not None else None


def tidb_count(address: str, facts: Facts, fresh_from: float) -> int | None:
    """Return TiDB's own count of all client connections, or None if it is older than `fresh_from`."""
    health = facts.health.get(address)
    if health is None or health.connections_at is None or health.connections_at < fresh_from:
        return None
    return health.connections


def best_session_count(address: str, endpoint: str | None, facts: Facts, fresh_from: float) -> int | None:
    """Return TiDB's own count while it is fresh, else the Envoys' count; None if neither is known."""
    count = tidb_count(address, facts, fresh_from)
    return session_count(address, endpoint, facts) if count is None else count


def tidb_count_stale_before(policy: Policy, now: float) -> float:
    """Return the time before which a TiDB server's own count is stale."""
    return now - 3 * max(policy.status_interval, 1.0)


def report_stale_before(policy: Policy, now: float) -> float:
    """Return the time before which the latest report of an Envoy is stale."""
    return now - max(5.0, 3 * policy.report_interval)


def migration_capable(
    facts: Facts, policy: Policy, now: float
) -> tuple[dict[str, SessionCounts], list[SessionCounts]]:
    """Return the counts of modules that can migrate sessions, by Envoy, and the counts of all other modules.

    The others have stale reports, or do not report the `instance` of their Envoy process.
    """
    fresh_from = report_stale_before(policy, now)
    capable: dict[str, SessionCounts] = {}
    incapable: list[SessionCounts] = []
    for envoy, counts in facts.session_counts.items():
        if counts.has_served:
            if counts.at >= fresh_from and counts.instance:
                capable[envoy] = counts
            else:
                incapable.append(counts)
    return capable, incapable


def silent_envoys(facts: Facts, since: float) -> list[str]:
    """Return the Envoys whose latest session report is from before `since`."""
    reporting = facts.loads.keys() | facts.session_counts.keys()
    return [e for e in reporting if (source := _session_source(e, facts)) is not None and source.at < since]


def for_envoys(envoys: Collection[str], address: str, endpoint: str | None, facts: Facts) -> int:
    """Return the sessions of the given Envoys on a node."""
    count = 0
    for envoy in envoys:
        source = _session_source(envoy, facts)
        if isinstance(source, SessionCounts):
            count += source.sessions.get(address, 0)
        elif source is not None:
            count += source.sessions.get(endpoint or "", 0)
    return count


def nodes_awaiting_empty(plan: Plan) -> frozenset[NodeKey]:
    """Return the nodes that are waiting to become empty: a report of no sessions there changes the plan."""
    return frozenset(
        (address, planned.endpoint)
        for address, planned in plan.nodes.items()
        if planned.state in (State.DRAINING, State.GONE) and planned.eds_health and planned.endpoint
    )


def is_confirmed_empty(
    address: str, endpoint: str | None, since: float, facts: Facts, policy: Policy, now: float
) -> bool:
    """Return whether every recently seen Envoy has confirmed that it has no session on the node.

    A report counts only if it is fresh and taken long enough after `since`, when the node was taken out of
    service, and after the Envoy acknowledged that. An Envoy that is silent, or does not apply what we
    publish, may have sessions, so no node is confirmed empty until the Envoy is forgotten
    (`envoy_retention`). The same holds shortly after our own start, when the Envoys are not known yet, and
    while a control plane replica is unreachable.
    """
    if reported(address, endpoint, facts) > 0:
        return False
    if endpoint is None:
        return True
    if facts.unreachable_replicas or now - facts.observing_since < policy.reconnect_grace:
        return False
    return all(
        envoy not in facts.unsynced_envoys and _confirms_empty(envoy, address, since, facts, policy, now)
        for envoy, last_seen in facts.envoys_last_seen.items()
        if now - last_seen <= policy.envoy_retention
    )


def _confirms_empty(envoy: str, address: str, since: float, facts: Facts, policy: Policy, now: float) -> bool:
    """Return whether an Envoy without a reported session on the node has confirmed that it has none."""
    fresh_from = report_stale_before(policy, now)
    acknowledged_at = facts.closed_acks.get(envoy, EMPTY_MAP).get(address)
    if acknowledged_at is None:
        return False
    closed_at = max(since, acknowledged_at)
    counts = facts.session_counts.get(envoy)
    if counts is None and envoy in facts.module_envoys:
        return False  # its sessions may have migrated, and it has not reported yet where they are
    if counts is not None:
        # A session counts at its first node as soon as it connects there, but at the target of a migration
        # only when the migration is complete. A module that has served no session migrates none.
        transit_seconds = policy.migration_timeout if counts.has_served else policy.connect_timeout
        settled_at = closed_at + transit_seconds + COUNT_DELAY_SECONDS
        if (
            counts.at < fresh_from
            or counts.counting_since < settled_at
            or address not in counts.complete_nodes
        ):
            return False
        if counts.has_served:
            return True
    # Load reports count a connection once it is established. One whose node was picked before the node was
    # closed may therefore appear up to a connect timeout and a report interval later.
    load = facts.loads.get(envoy)
    settled_at = closed_at + policy.connect_timeout + policy.report_interval
    return load is not None and load.at >= max(fresh_from, settled_at)


def _session_source(envoy: str, facts: Facts) -> SessionCounts | EnvoyLoad | None:
    """Return the report that counts an Envoy's sessions: the module's or the load report."""
    counts = facts.session_counts.get(envoy)
    return counts if counts is not None and counts.has_served else facts.loads.get(envoy)
