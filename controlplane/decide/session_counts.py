"""How many sessions a node has, and whether it is surely empty. Pure.

Two witnesses tell of an Envoy's sessions. Its module, once it has had any, counts each at the node where it
is. Load reports, which every Envoy sends, keep a session for ever at the node that it came to first; so they
count where there is no module, or where it has never had a session, and none can have moved
(docs/internals/decisions/0007-the-module-reports-session-counts.md).
"""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.nodes import NOTHING, Place, State
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import Census

# Seconds until what a module counts stands among the stats of its Envoy.
COUNTED = 1.0


def known(address: str, endpoint: str | None, facts: Facts) -> int:
    """Sessions of all Envoys that are known to be on a node."""
    return facts.counted.get(address, 0) + facts.live.get(endpoint or "", 0)


def sessions(address: str, endpoint: str | None, facts: Facts) -> int | None:
    """Sessions of all Envoys on a node; None while no Envoy has reported anything."""
    if endpoint is None or not (facts.loads or facts.censuses):
        return None
    return known(address, endpoint, facts)


def of_envoy(envoy: str, facts: Facts) -> int | None:
    """Sessions of an Envoy on all nodes; None while it has reported nothing."""
    witness = _witness(envoy, facts)
    if isinstance(witness, Census):
        return sum(witness.sessions.values())
    return sum(witness.live.values()) if witness is not None else None


def of_tidb(address: str, facts: Facts, fresh_from: float) -> int | None:
    """Connections of a node by its own count, whoever they are of; None when that is older than this."""
    health = facts.health.get(address)
    if health is None or health.connections_at is None or health.connections_at < fresh_from:
        return None
    return health.connections


def total(address: str, endpoint: str | None, facts: Facts, fresh_from: float) -> int | None:
    """Sessions on a node: by its own count while that is fresh, else by the Envoys'; None: not known."""
    own = of_tidb(address, facts, fresh_from)
    return sessions(address, endpoint, facts) if own is None else own


def counted_from(policy: Policy, now: float) -> float:
    """What a TiDB server has counted before then is not believed any more."""
    return now - 3 * max(policy.status_interval, 1.0)


def recent(policy: Policy, now: float) -> float:
    """Whose last report is from before then has fallen silent."""
    return now - max(5.0, 3 * policy.report_interval)


def able(facts: Facts, policy: Policy, now: float) -> tuple[dict[str, Census], list[Census]]:
    """Modules that can be asked for sessions, by Envoy; and others: silent ones, and such as have no name."""
    fresh_from = recent(policy, now)
    asked: dict[str, Census] = {}
    unasked: list[Census] = []
    for envoy, census in facts.censuses.items():
        if census.has_served:
            if census.at >= fresh_from and census.instance:
                asked[envoy] = census
            else:
                unasked.append(census)
    return asked, unasked


def silent(facts: Facts, since: float) -> list[str]:
    """Envoys whose sessions were told of before `since` for the last time."""
    everybody = facts.loads.keys() | facts.censuses.keys()
    return [e for e in everybody if (witness := _witness(e, facts)) is not None and witness.at < since]


def of_envoys(envoys: Collection[str], address: str, endpoint: str | None, facts: Facts) -> int:
    """Of the sessions that are known to be on a node, those of some Envoys."""
    count = 0
    for envoy in envoys:
        witness = _witness(envoy, facts)
        if isinstance(witness, Census):
            count += witness.sessions.get(address, 0)
        elif witness is not None:
            count += witness.live.get(endpoint or "", 0)
    return count


def awaited(plan: Plan) -> frozenset[Place]:
    """Where a last session is waited for, so that a report that shows none is news."""
    return frozenset(
        (address, planned.endpoint)
        for address, planned in plan.nodes.items()
        if planned.state in (State.DRAINING, State.GONE) and planned.advice and planned.endpoint
    )


def surely_empty(
    address: str, endpoint: str | None, since: float, facts: Facts, policy: Policy, now: float
) -> bool:
    """Whether every Envoy that was seen lately has told that it has no session on the node.

    Its word counts only when it is recent, and is of long enough after `since`, the time at which the node
    was taken out of service, and after the Envoy is known to have heard of that. An Envoy that fell silent,
    or does not follow what we publish, may have sessions, so it counts until it is forgotten. Shortly after
    our own start nobody knows yet which Envoys there are; those of a control plane that is not heard, never.
    """
    if known(address, endpoint, facts) > 0:
        return False
    if endpoint is None:
        return True
    if facts.unheard or now - facts.began < policy.fleet_return:
        return False
    return all(
        envoy not in facts.doubted and _denies(envoy, address, since, facts, policy, now)
        for envoy, seen in facts.envoys.items()
        if now - seen <= policy.envoy_memory
    )


def _denies(envoy: str, address: str, since: float, facts: Facts, policy: Policy, now: float) -> bool:
    """Whether an Envoy of which no session on the node is known has told that there is none."""
    fresh_from = recent(policy, now)
    heeded = facts.heeded.get(envoy, NOTHING).get(address)
    if heeded is None:
        return False
    closed = max(since, heeded)
    census = facts.censuses.get(envoy)
    if census is None and envoy in facts.modules:
        return False  # its sessions may have moved, and it has not told yet where they are
    if census is not None:
        # A session counts at its first node from when it is on its way there, but at another only when its
        # move is over. Where there was none, none is moving.
        on_its_way = policy.move_limit if census.has_served else policy.connect_timeout
        settled = closed + on_its_way + COUNTED
        if census.at < fresh_from or census.began < settled or address not in census.covered:
            return False
        if census.has_served:
            return True
    # Envoys count a connection once it is established, so one that was chosen before the node was closed
    # shows up to a connect timeout and a report interval later.
    load = facts.loads.get(envoy)
    settled = closed + policy.connect_timeout + policy.report_interval
    return load is not None and load.at >= max(fresh_from, settled)


def _witness(envoy: str, facts: Facts) -> Census | EnvoyLoad | None:
    """Who tells of an Envoy's sessions."""
    census = facts.censuses.get(envoy)
    return census if census is not None and census.has_served else facts.loads.get(envoy)
