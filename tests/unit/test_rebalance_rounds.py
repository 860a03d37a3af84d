"""Round after round over a simulated fleet: it ends with fair shares, soon, and then stays quiet."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from controlplane.decide.plan import plan
from controlplane.model import (
    Drain,
    Facts,
    Health,
    Intents,
    Node,
    Outcome,
    Plan,
    Policy,
    Probe,
    Source,
    State,
    Topology,
)
from controlplane.traffic import Census

START = 2_000_000.0
POLICY = Policy(slow_start=30.0, fleet_return=0.0)
ADDRESSES = [f"10.0.0.{i}:4000" for i in range(1, 5)]
PASSED = Probe(Outcome.PASS, "it passes", 9, START)
HEALTHY = Health(PASSED, PASSED)


@dataclass
class SimulatedModule:
    """An Envoy's module: it moves what it is asked to, to the node with the fewest sessions by weight."""

    instance: str
    sessions: dict[str, int]
    pace: int = 10**9  # moves a second
    moved: int = 0
    rounds: dict[str, int] = field(default_factory=dict)  # of each node, the round that is known
    left: dict[str, int] = field(default_factory=dict)
    told: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)

    def obey(self, planned: Plan) -> None:
        for address in self.sessions:
            asked = planned.rebalance.moves.get(address)
            if asked is None:
                self.left[address] = 0
                self.rounds.pop(address, None)
            elif self.rounds.get(address) != planned.rebalance.round:
                self.rounds[address] = planned.rebalance.round
                self.left[address] = asked.get(self.instance, 0)
            draining = planned.nodes[address].state is State.DRAINING
            wanted = self.sessions[address] if draining else min(self.left[address], self.pace)
            for _ in range(wanted):
                self._move(address, planned, None if draining else planned.rebalance.wants)
                self.left[address] -= 1

    def _move(self, address: str, planned: Plan, wants: Collection[str] | None) -> None:
        """To any node in service or, when it is spared, to one of those that want it."""
        open_for = {
            a: p.weight
            for a, p in planned.nodes.items()
            if p.weight and a != address and (wants is None or a in wants)
        }
        target = min(open_for, key=lambda a: (self.sessions[a] + 1) / open_for[a])
        self.sessions[address] -= 1
        self.sessions[target] += 1
        self.moved += 1

    def tell(self, now: float) -> None:
        self.told.append((now, dict(self.sessions)))

    def census(self, now: float) -> Census:
        """What it has counted a second ago, as of two seconds before that at the earliest."""
        seen = [told for told in self.told if told[0] <= now - 1.0]
        return Census(now, now - 3.0, seen[-1][1], frozenset(ADDRESSES), instance=self.instance)


class Site:
    """Nodes, Envoys and a control plane, a second after the other."""

    def __init__(self, *modules: SimulatedModule) -> None:
        self.modules = modules
        self.now = START
        self.plan = Plan()
        self.intents = Intents()
        self.published: list[float] = []  # when something was asked for anew
        for module in modules:
            module.tell(self.now - 10.0)

    def sums(self) -> list[int]:
        return [sum(module.sessions[a] for module in self.modules) for a in ADDRESSES]

    def second(self, *, silent: bool = False) -> None:
        self.now += 1.0
        round_before = self.plan.rebalance.round
        self.plan = plan(self.plan, self._facts(silent), self.intents, POLICY, self.now)
        if self.plan.rebalance.round != round_before:
            self.published.append(self.now)
        for module in self.modules:
            module.obey(self.plan)
            module.tell(self.now)

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()

    def _facts(self, silent: bool) -> Facts:
        at = START if silent else self.now
        censuses = {f"e{index}": module.census(at) for index, module in enumerate(self.modules)}
        counted: dict[str, int] = {}
        for census in censuses.values():
            for address, count in census.sessions.items():
                counted[address] = counted.get(address, 0) + count
        listed = {a: Node(a, Source.STATIC) for a in ADDRESSES}
        return Facts(
            topologies={
                Source.STATIC: Topology(Source.STATIC, listed, complete=True),
                Source.PD: Topology(Source.PD, complete=True),
                Source.API: Topology(Source.API, complete=True),
            },
            health=dict.fromkeys(ADDRESSES, HEALTHY),
            censuses=censuses,
            counted=counted,
            envoys=dict.fromkeys(censuses, at),
            heeded=dict.fromkeys(censuses, dict.fromkeys(ADDRESSES, START)),
        )


def module(number: int, *counts: int, pace: int = 10**9) -> SimulatedModule:
    return SimulatedModule(f"{number:016x}", dict(zip(ADDRESSES, counts, strict=True)), pace)


def joined(*modules: SimulatedModule) -> Site:
    """The last node has been drained, and is taken back after the others have been there for long."""
    site = Site(*modules)
    site.intents = Intents(drains={ADDRESSES[-1]: Drain(START, 600.0)})
    site.seconds(100)
    for each in modules:
        each.moved = 0
    site.published.clear()
    site.intents = Intents()
    return site


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("total", [7, 60, 900, 12_000])
def test_a_node_that_joins_has_its_share_soon_and_nothing_flaps(seed: int, total: int) -> None:
    chance = random.Random(seed)
    modules = []
    for number in range(3):
        there = [chance.randrange(total // 9 + 1) for _ in ADDRESSES[:-1]]
        modules.append(module(number, *there, 0))
    site = joined(*modules)
    before = site.sums()
    share = sum(before) / len(ADDRESSES)
    lows = before
    for _ in range(95):
        site.second()
        lows = [min(low, now) for low, now in zip(lows, site.sums(), strict=True)]
    after = site.sums()
    assert sum(after) == sum(before)
    assert after[-1] >= min(0.9 * share, share - 2) - 1
    # Nobody has given below its share, not even for a while, but who had less to begin with.
    assert all(low >= min(share, had) - 1e-6 for low, had in zip(lows, before, strict=True))
    # No session has moved for nothing.
    assert sum(each.moved for each in modules) <= after[-1] + sum(
        max(0, now - had) for now, had in zip(after[:-1], before[:-1], strict=True)
    )
    assert site.plan.rebalance.since is None
    quiet = site.plan
    site.seconds(200)
    assert site.sums() == after
    assert site.plan == quiet


def test_a_slow_module_is_asked_again_for_what_it_could_not_do() -> None:
    site = joined(module(1, 300, 300, 300, 0, pace=5))
    site.seconds(95)
    assert site.published
    assert site.sums()[-1] > 150
    gaps = [late - early for early, late in zip(site.published, site.published[1:], strict=False)]
    assert min(gaps) >= 9.0  # the round, and the time until it shows what came of it


def test_without_reports_it_stops_and_with_them_it_goes_on() -> None:
    site = joined(module(1, 300, 300, 300, 0), module(2, 90, 90, 90, 0))
    site.seconds(1)
    rounds = len(site.published)
    for _ in range(60):
        site.second(silent=True)
    assert len(site.published) == rounds
    assert not site.plan.rebalance.moves
    assert site.plan.rebalance.since is not None
    site.seconds(10)
    assert len(site.published) == rounds + 1


def test_rolling_restarts_end_with_fair_shares() -> None:
    site = joined(module(1, 100, 100, 100, 0), module(2, 50, 50, 50, 0))
    site.seconds(100)
    for address in ADDRESSES:
        site.intents = Intents(drains={address: Drain(site.now, 600.0)})
        site.seconds(10)
        site.intents = Intents()
        site.seconds(45)
    site.seconds(100)
    assert max(site.sums()) - min(site.sums()) <= 8
    assert site.plan.rebalance.since is None
