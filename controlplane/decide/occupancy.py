"""How many sessions a node has, and whether it is surely empty. Pure."""

from __future__ import annotations

from controlplane.model import Facts, Plan, Policy, State


def sessions(endpoint: str | None, facts: Facts) -> int | None:
    """Live connections of all Envoys to an endpoint; None while no Envoy has reported anything."""
    if not facts.loads or endpoint is None:
        return None
    return facts.live.get(endpoint, 0)


def awaited(plan: Plan) -> frozenset[str]:
    """Endpoints on which a last session is waited for, so that a report that shows none is news."""
    return frozenset(
        planned.endpoint
        for planned in plan.nodes.values()
        if planned.state in (State.DRAINING, State.GONE) and planned.advice and planned.endpoint
    )


def surely_empty(endpoint: str | None, since: float, facts: Facts, policy: Policy, now: float) -> bool:
    """Whether every Envoy that was seen lately has reported no connection to the endpoint.

    A report counts only when it is recent and was made long enough after `since`, the time at which the node
    was taken out of service: Envoys count a connection once it is established, so one that was chosen before
    shows up to a connect timeout and a report interval later. An Envoy that fell silent, or does not follow
    what we publish, may have sessions, so it counts until it is forgotten. Shortly after our own start nobody
    knows yet which Envoys there are.
    """
    if endpoint is None:
        return True
    if facts.live.get(endpoint, 0) > 0 or now - facts.began < policy.fleet_return:
        return False
    recent = max(5.0, 3 * policy.report_interval)
    settled = since + policy.connect_timeout + policy.report_interval
    for envoy, seen in facts.envoys.items():
        if now - seen > policy.envoy_memory:
            continue
        load = facts.loads.get(envoy)
        if envoy in facts.doubted or load is None or now - load.at > recent or load.at < settled:
            return False
    return True
