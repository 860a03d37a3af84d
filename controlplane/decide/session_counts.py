"""How many sessions a node has, and whether it is surely empty. Pure.

Two witnesses tell of an Envoy's sessions. Its module, once it has had any, counts each at the node where it
is. Load reports, which every Envoy sends, keep a session for ever at the node that it came to first; so they
count where there is no module, or where it has never had a session, and none can have moved
(docs/internals/decisions/0007-the-module-reports-session-counts.md).
"""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.nodes import EMPTY_MAP, NodeKey, State
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import SessionCounts

# Seconds until what a module counts stands among the stats of its Envoy.
COUNT_DELAY_SECONDS = 1.0


def reported(address: str, endpoint: str | None, facts: Facts) -> int:
    """Sessions of all Envoys that are known to be on a node."""
    return facts.sessions_by_address.get(address, 0) + facts.sessions_by_endpoint.get(endpoint or "", 0)


def session_count(address: str, endpoint: str | None, facts: Facts) -> int | None:
    """Sessions of all Envoys on a node; None while no Envoy has reported anything."""
    if endpoint is None or not (facts.loads or facts.session_counts):
        return None
    return reported(address, endpoint, facts)


def for_envoy(envoy: str, facts: Facts) -> int | None:
    """Sessions of an Envoy on all nodes; None while it has reported nothing."""
    source = _session_source(envoy, facts)
    if isinstance(source, SessionCounts):
        return sum(source.sessions.values())
    return sum(source.sessions.values()) if source is not None else None


def tidb_count(address: str, facts: Facts, fresh_from: float) -> int | None:
    """Connections of a node by its own count, whoever they are of; None when that is older than this."""
    health = facts.health.get(address)
    if health is None or health.connections_at is None or health.connections_at < fresh_from:
        return None
    return health.connections


def best_session_count(address: str, endpoint: str | None, facts: Facts, fresh_from: float) -> int | None:
    """Sessions on a node: by its own count while that is fresh, else by the Envoys'; None: not known."""
    own = tidb_count(address, facts, fresh_from)
    return session_count(address, endpoint, facts) if own is None else own


def tidb_count_stale_before(policy: Policy, now: float) -> float:
    """What a TiDB server has counted before then is not believed any more."""
    return now - 3 * max(policy.status_interval, 1.0)


def report_stale_before(policy: Policy, now: float) -> float:
    """Whose last report is from before then has fallen silent."""
    return now - max(5.0, 3 * policy.report_interval)


def migration_capable(
    facts: Facts, policy: Policy, now: float
) -> tuple[dict[str, SessionCounts], list[SessionCounts]]:
    """Modules that can be asked for sessions, by Envoy; and others: silent ones, and such as have no name."""
    fresh_from = report_stale_before(policy, now)
    capable: dict[str, SessionCounts] = {}
    incapable: list[SessionCounts] = []
    for envoy, census in facts.session_counts.items():
        if census.has_served:
            if census.at >= fresh_from and census.instance:
                capable[envoy] = census
            else:
                incapable.append(census)
    return capable, incapable


def silent_envoys(facts: Facts, since: float) -> list[str]:
    """Envoys whose sessions were told of before `since` for the last time."""
    reporting = facts.loads.keys() | facts.session_counts.keys()
    return [e for e in reporting if (witness := _session_source(e, facts)) is not None and witness.at < since]


def for_envoys(envoys: Collection[str], address: str, endpoint: str | None, facts: Facts) -> int:
    """Of the sessions that are known to be on a node, those of some Envoys."""
    count = 0
    for envoy in envoys:
        source = _session_source(envoy, facts)
        if isinstance(source, SessionCounts):
            count += source.sessions.get(address, 0)
        elif source is not None:
            count += source.sessions.get(endpoint or "", 0)
    return count


def nodes_awaiting_empty(plan: Plan) -> frozenset[NodeKey]:
    """Where a last session is waited for, so that a report that shows none is news."""
    return frozenset(
        (address, planned.endpoint)
        for address, planned in plan.nodes.items()
        if planned.state in (State.DRAINING, State.GONE) and planned.eds_health and planned.endpoint
    )


def is_confirmed_empty(
    address: str, endpoint: str | None, since: float, facts: Facts, policy: Policy, now: float
) -> bool:
    """Whether every Envoy that was seen lately has told that it has no session on the node.

    Its word counts only when it is recent, and is of long enough after `since`, the time at which the node
    was taken out of service, and after the Envoy is known to have heard of that. An Envoy that fell silent,
    or does not follow what we publish, may have sessions, so it counts until it is forgotten. Shortly after
    our own start nobody knows yet which Envoys there are; those of a control plane that is not heard, never.
    """
    if reported(address, endpoint, facts) > 0:
        return False
    if endpoint is None:
        return True
    if facts.unreachable_replicas or now - facts.observing_since < policy.reconnect_grace:
        return False
    return all(
        envoy not in facts.unsynced_envoys and _confirms_empty(envoy, address, since, facts, policy, now)
        for envoy, seen in facts.envoys_last_seen.items()
        if now - seen <= policy.envoy_retention
    )


def _confirms_empty(envoy: str, address: str, since: float, facts: Facts, policy: Policy, now: float) -> bool:
    """Whether an Envoy of which no session on the node is known has told that there is none."""
    fresh_from = report_stale_before(policy, now)
    acknowledged_at = facts.closed_acks.get(envoy, EMPTY_MAP).get(address)
    if acknowledged_at is None:
        return False
    closed_at = max(since, acknowledged_at)
    census = facts.session_counts.get(envoy)
    if census is None and envoy in facts.module_envoys:
        return False  # its sessions may have moved, and it has not told yet where they are
    if census is not None:
        # A session counts at its first node from when it is on its way there, but at another only when its
        # move is over. Where there was none, none is moving.
        transit_seconds = policy.migration_timeout if census.has_served else policy.connect_timeout
        settled_at = closed_at + transit_seconds + COUNT_DELAY_SECONDS
        if (
            census.at < fresh_from
            or census.counting_since < settled_at
            or address not in census.complete_nodes
        ):
            return False
        if census.has_served:
            return True
    # Envoys count a connection once it is established, so one that was chosen before the node was closed
    # shows up to a connect timeout and a report interval later.
    load = facts.loads.get(envoy)
    settled_at = closed_at + policy.connect_timeout + policy.report_interval
    return load is not None and load.at >= max(fresh_from, settled_at)


def _session_source(envoy: str, facts: Facts) -> SessionCounts | EnvoyLoad | None:
    """Who tells of an Envoy's sessions."""
    census = facts.session_counts.get(envoy)
    return census if census is not None and census.has_served else facts.loads.get(envoy)
