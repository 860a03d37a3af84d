"""Nodes of a plan, and what Envoys and nodes tell of their sessions, each in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.nodes import Node, Quarter, Source, State
from controlplane.model.plan import Advice, NodePlan, Plan, Policy, Rebalance
from controlplane.model.traffic import Census

NOW = 2_000_000.0
LONG_AGO = NOW - 10_000.0
POLICY = Policy(slow_start=0, fleet_return=15.0)
A, B, C, D = ADDRESSES = [f"10.0.0.{i}:4000" for i in range(1, 5)]
X, Y = "00000000000000aa", "00000000000000bb"  # the processes of the Envoys x and y


def node(
    address: str,
    since: float = LONG_AGO,
    weight: int = 100,
    state: State = State.ACTIVE,
    **fields: object,
) -> NodePlan:
    """A node that has been in service since then."""
    active = since if state is State.ACTIVE else None
    planned = NodePlan(
        Node(address, Source.PD, weight=weight), state, "", since, Advice.HEALTHY, weight, address, active
    )
    return replace(planned, **fields)  # type: ignore[arg-type]


def nodes(*planned: NodePlan) -> dict[str, NodePlan]:
    return {each.node.address: each for each in planned}


@dataclass(frozen=True)
class Fleet:
    """What modules tell of their sessions, by Envoy and then by address; and what others tell beside them."""

    sessions: Mapping[str, Mapping[str, int]]
    at: float = NOW
    began: float = NOW - 2
    instances: Mapping[str, str] = field(default_factory=lambda: {"x": X, "y": Y})
    covered: frozenset[str] = frozenset(ADDRESSES)
    silent: frozenset[str] = frozenset()  # Envoys that told all of that long ago
    plain: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of Envoys that have no module
    own: Mapping[str, int] = field(default_factory=dict)  # what nodes count themselves
    counted_at: float = NOW  # when they counted it

    def facts(self, **more: object) -> Facts:
        censuses = {
            envoy: Census(
                *((self.at - 60, self.began - 60) if envoy in self.silent else (self.at, self.began)),
                sessions={a: count for a, count in there.items() if count},
                covered=self.covered,
                instance=self.instances.get(envoy, ""),
            )
            for envoy, there in self.sessions.items()
        }
        known = Facts(
            censuses=censuses,
            counted=_sum(*(census.sessions for census in censuses.values())),
            loads={envoy: EnvoyLoad(envoy, self.at, there) for envoy, there in self.plain.items()},
            live=_sum(*self.plain.values()),
            envoys=dict.fromkeys(censuses, self.at),
            health={a: Health(connections=n, connections_at=self.counted_at) for a, n in self.own.items()},
        )
        return replace(known, **more)  # type: ignore[arg-type]


def _sum(*counts: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counts:
        for address, count in each.items():
            sums[address] = sums.get(address, 0) + count
    return sums


JOINED = nodes(node(A), node(B), node(C, NOW))
FLEET = Fleet({"x": {A: 30, B: 30}, "y": {A: 15, B: 15}})


def decided(
    facts: Facts,
    planned: Mapping[str, NodePlan] = JOINED,
    before: Rebalance | None = None,
    policy: Policy = POLICY,
    now: float = NOW,
    floor: str = "",
    full: frozenset[Quarter] = frozenset(),
) -> Rebalance:
    """What is asked for now, by nodes that are as they were."""
    past = Plan(planned, "", before or Rebalance())
    return rebalance(planned, full, floor, past, facts, policy, now)


def given(found: Rebalance) -> dict[str, int]:
    """How many sessions each node is asked for."""
    return {address: sum(counts.values()) for address, counts in found.moves.items()}


def wanted(found: Rebalance) -> dict[str, int]:
    """How many sessions each node is to get."""
    return {address: sum(counts.values()) for address, counts in found.wants.items()}


def level(widths: Sequence[float], fixed: Sequence[int], poured: int) -> float:
    """How high so much more comes to stand in vessels that hold some already: found by halving."""
    low, high = 0.0, (sum(fixed) + poured + 1) / min(widths)
    for _ in range(200):
        middle = (low + high) / 2
        taken = sum(max(0.0, middle * width - held) for width, held in zip(widths, fixed, strict=True))
        low, high = (middle, high) if taken < poured else (low, middle)
    return low
