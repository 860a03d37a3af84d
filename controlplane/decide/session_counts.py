"""Count the sessions of a node, and decide whether it is confirmed empty. No I/O.

An Envoy's sessions are known from two reports. Tidevoy's module counts each session at its current node. Load
reports, which every Envoy sends, count a session at its first node even after it has migrated. They are used
only if no session can have migrated, because the Envoy has no module, or its module has never counted a
session (docs/internals/decisions/0007-the-module-reports-session-counts.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from controlplane.decide.inputs import Inputs
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.nodes import EMPTY_MAP, NodeKey, State
from controlplane.model.plan import Plan
from controlplane.model.traffic import SessionCounts

# The module's counts appear in Envoy's stats up to this many seconds late.
COUNT_DELAY_SECONDS = 1.0
# An Envoy that connects again sooner is not reported as missing.
_MISSING_AFTER_SECONDS = 5.0


def sessions_reported_by_envoys(address: str, endpoint: str | None, facts: Facts) -> int:
    """Return how many sessions all Envoys together report on a node."""
    return facts.sessions_by_address.get(address, 0) + facts.sessions_by_endpoint.get(endpoint or "", 0)


def session_count(address: str, endpoint: str | None, facts: Facts) -> int | None:
    """Return how many sessions all Envoys have on a node, or None while no Envoy has reported anything."""
    if endpoint is None or not (facts.loads or facts.session_counts):
        return None
    return sessions_reported_by_envoys(address, endpoint, facts)


def sessions_of_envoy(envoy: str, facts: Facts) -> int | None:
    """Return how many sessions an Envoy has on all nodes, or None while it has reported nothing."""
    source = _session_source(envoy, facts)
    return sum(source.sessions.values()) if source is not None else None


def tidb_count(address: str, facts: Facts, fresh_from: float) -> int | None:
    """Return the TiDB server's own count of its client connections, or None if it is not fresh."""
    health = facts.health.get(address)
    if health is None or health.connections_at is None or health.connections_at < fresh_from:
        return None
    return health.connections


def best_session_count(address: str, endpoint: str | None, facts: Facts, fresh_from: float) -> int | None:
    """Return the TiDB server's own count if it is fresh, else the Envoys' count; None if both are unknown."""
    count = tidb_count(address, facts, fresh_from)
    return session_count(address, endpoint, facts) if count is None else count


def migration_capable(inputs: Inputs) -> tuple[dict[str, SessionCounts], list[SessionCounts]]:
    """Return the counts of modules that can migrate sessions, by Envoy, and of modules that cannot.

    A module cannot migrate sessions if its report is stale or lacks the `instance` of its Envoy process, or
    if migrations are switched off for its Envoy. A module that has never counted a session is in neither
    result.
    """
    fresh_from = inputs.reports_stale_before
    capable: dict[str, SessionCounts] = {}
    incapable: list[SessionCounts] = []
    for envoy, counts in inputs.facts.session_counts.items():
        if counts.has_counted_sessions:
            if counts.at >= fresh_from and counts.instance and inputs.may_migrate_sessions(envoy):
                capable[envoy] = counts
            else:
                incapable.append(counts)
    return capable, incapable


def silent_envoys(facts: Facts, since: float) -> list[str]:
    """Return the Envoys that have not reported sessions since the time `since`."""
    reporting = facts.loads.keys() | facts.session_counts.keys()
    return [e for e in reporting if (source := _session_source(e, facts)) is not None and source.at < since]


def envoys_counted_from(facts: Facts, excluded: Collection[str]) -> float:
    """Return the time since which all Envoys have counted their sessions, except the `excluded` Envoys."""
    envoys = (facts.loads.keys() | facts.session_counts.keys()).difference(excluded)
    sources = [source for envoy in envoys if (source := _session_source(envoy, facts)) is not None]
    return min(
        (s.oldest_count_at - COUNT_DELAY_SECONDS if isinstance(s, SessionCounts) else s.at for s in sources),
        default=-math.inf,
    )


def sessions_of_envoys_on_node(
    envoys: Collection[str], address: str, endpoint: str | None, facts: Facts
) -> int:
    """Return how many sessions these Envoys have on a node."""
    count = 0
    for envoy in envoys:
        source = _session_source(envoy, facts)
        if isinstance(source, SessionCounts):
            count += source.sessions.get(address, 0)
        elif source is not None:
            count += source.sessions.get(endpoint or "", 0)
    return count


def nodes_awaiting_empty(plan: Plan) -> frozenset[NodeKey]:
    """Return the nodes that stay in their state until no session is left on them."""
    return frozenset(
        (address, planned.endpoint)
        for address, planned in plan.nodes.items()
        if planned.state in (State.DRAINING, State.GONE) and planned.eds_health and planned.endpoint
    )


def is_confirmed_empty(address: str, endpoint: str | None, since: float, inputs: Inputs) -> bool:
    """Return whether every recently seen Envoy has confirmed that it has no session on the node.

    The node was taken out of service at `since`. A report counts only if it is fresh, and if the counts in it
    were taken long enough after `since` and after the Envoy acknowledged the change. An Envoy that sends no
    reports or acknowledgements may have sessions, so no node is confirmed empty before that Envoy is
    forgotten (`envoy_retention`). Just after the start of this control plane, when not all Envoys are known
    yet, and while a control plane replica is unreachable, no node with an endpoint is confirmed empty.
    """
    facts, policy, now = inputs.facts, inputs.policy, inputs.now
    if sessions_reported_by_envoys(address, endpoint, facts) > 0:
        return False
    if endpoint is None:
        return True
    if facts.unreachable_replicas or now - facts.observing_since < policy.reconnect_grace:
        return False
    return all(
        envoy not in facts.unsynced_envoys and _confirms_empty(envoy, address, since, inputs)
        for envoy, last_seen in facts.envoys_last_seen.items()
        if now - last_seen <= policy.envoy_retention
    )


def missing_envoys(inputs: Inputs) -> tuple[str, ...]:
    """Return the Envoys that are disconnected, and for which drains wait, because they may have sessions."""
    facts, policy, now = inputs.facts, inputs.policy, inputs.now
    return tuple(
        sorted(
            envoy
            for envoy in facts.unsynced_envoys
            if _MISSING_AFTER_SECONDS
            <= now - facts.envoys_last_seen.get(envoy, now)
            <= policy.envoy_retention
        )
    )


def _confirms_empty(envoy: str, address: str, since: float, inputs: Inputs) -> bool:
    """Return whether an Envoy that reports no session on the node surely has none."""
    facts, policy, fresh_from = inputs.facts, inputs.policy, inputs.reports_stale_before
    acknowledged_at = facts.closed_acks.get(envoy, EMPTY_MAP).get(address)
    if acknowledged_at is None:
        return False
    closed_at = max(since, acknowledged_at)
    counts = facts.session_counts.get(envoy)
    if counts is None and envoy in facts.module_envoys:
        return False  # sessions may have migrated to the node, and the module has not reported yet
    if counts is not None:
        # The module counts a session at its first node as soon as it connects, but at the target of a
        # migration only after the migration. A module that has never counted a session migrates none.
        transit_seconds = policy.migration_timeout if counts.has_counted_sessions else policy.connect_timeout
        settled_at = closed_at + transit_seconds + COUNT_DELAY_SECONDS
        if (
            counts.at < fresh_from
            or counts.oldest_count_at < settled_at
            or address not in counts.complete_nodes
        ):
            return False
        if counts.has_counted_sessions:
            return True
    # Load reports count a connection once it is established. If Envoy picked the node just before the node
    # left service, the connection may appear up to a connect timeout and a report interval later.
    load = facts.loads.get(envoy)
    settled_at = closed_at + policy.connect_timeout + policy.report_interval
    return load is not None and load.at >= max(fresh_from, settled_at)


def _session_source(envoy: str, facts: Facts) -> SessionCounts | EnvoyLoad | None:
    """Return the report that counts an Envoy's sessions: the module's or the load report."""
    counts = facts.session_counts.get(envoy)
    return counts if counts is not None and counts.has_counted_sessions else facts.loads.get(envoy)
