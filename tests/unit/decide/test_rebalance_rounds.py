"""Round after round over a simulated fleet: it ends with fair shares, soon, and then stays quiet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from controlplane.decide.plan import plan
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State, Topology
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import MOVED, SessionCounts
from tests.support.controlplane.balance_inputs import ADDRESSES

START = 2_000_000.0
POLICY = Policy(slow_start=30.0, reconnect_grace=0.0)
PASSED = CheckResult(CheckStatus.PASS, "it passes", 9, START)
HEALTHY = Health(PASSED, PASSED)


@dataclass
class Allowance:
    """Of each node, how many sessions one Envoy may still move in the round that it knows."""

    rounds: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def hear(self, number: int, asked: Mapping[str, Mapping[str, int]], instance: str) -> None:
        for address in ADDRESSES:
            if address not in asked:
                self.left[address] = 0
                self.rounds.pop(address, None)
            elif self.rounds.get(address) != number:
                self.rounds[address] = number
                self.left[address] = asked[address].get(instance, 0)


@dataclass
class SimulatedModule:
    """An Envoy's module: it moves what it is asked to, to nodes that want some, and no more than they do."""

    instance: str
    sessions: dict[str, int]
    pace: int = 10**9  # moves a second and node
    moved: int = 0
    moves: Allowance = field(default_factory=Allowance)
    wants: Allowance = field(default_factory=Allowance)
    told: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)

    def obey(self, planned: Plan) -> None:
        asked = planned.rebalance
        self.moves.hear(asked.round, asked.outgoing, self.instance)
        self.wants.hear(asked.round, asked.incoming, self.instance)
        for address in self.sessions:
            is_left = planned.nodes[address].state is State.DRAINING
            count = self.sessions[address] if is_left else min(self.moves.left[address], self.pace)
            for _ in range(count):
                wanted = None if is_left else {a for a, left in self.wants.left.items() if left}
                if wanted is None or wanted:
                    self._move(address, planned, wanted)

    def _move(self, address: str, planned: Plan, wanted: Collection[str] | None) -> None:
        """To any node in service or, when it is spared, to one of those that want it."""
        open_for = {
            a: p.weight
            for a, p in planned.nodes.items()
            if p.weight and a != address and (wanted is None or a in wanted)
        }
        target = min(open_for, key=lambda a: (self.sessions[a] + 1) / open_for[a])
        self.sessions[address] -= 1
        self.sessions[target] += 1
        self.moved += 1
        if wanted is not None:
            self.moves.left[address] -= 1
            self.wants.left[target] -= 1

    def tell(self, now: float) -> None:
        self.told = [*self.told[-4:], (now, dict(self.sessions))]

    def census(self, now: float) -> SessionCounts:
        """What it has counted a second ago, as of two seconds before that at the earliest."""
        seen = [told for told in self.told if told[0] <= now - 1.0]
        return SessionCounts(now, now - 3.0, seen[-1][1], frozenset(ADDRESSES), instance=self.instance)


class Site:
    """Nodes, Envoys and a control plane, a second after the other."""

    def __init__(self, *modules: SimulatedModule, arrivals: int = 0, seed: int = 0) -> None:
        """`arrivals`: sessions that open each second. Then each ends with a chance of 1 % a second."""
        self.modules = modules
        self.now = START
        self.plan = Plan()
        self.intents = Intents()
        self.asked: list[tuple[float, int]] = []  # when something was asked for anew, and how much
        self.own = False  # whether nodes count their connections themselves
        self._told: dict[str, SessionCounts] = {}
        self._arrivals, self._chance = arrivals, random.Random(seed)
        for module in modules:
            module.tell(self.now - 10.0)

    def sums(self) -> list[int]:
        return [sum(module.sessions[a] for module in self.modules) for a in ADDRESSES]

    def second(self, *, silent: bool = False) -> None:
        self.now += 1.0
        round_before = self.plan.rebalance.round
        self.plan = plan(self.plan, self._facts(silent), self.intents, POLICY, self.now)
        if self.plan.rebalance.round != round_before:
            count = sum(sum(each.values()) for each in self.plan.rebalance.outgoing.values())
            self.asked.append((self.now, count))
        self._live()
        for module in self.modules:
            module.obey(self.plan)
            module.tell(self.now)

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()

    def _live(self) -> None:
        """Sessions open by weight, and end."""
        if not self._arrivals:
            return
        weights = [p.weight for p in self.plan.nodes.values()]
        for address in self._chance.choices(list(self.plan.nodes), weights, k=self._arrivals):
            self._chance.choice(self.modules).sessions[address] += 1
        for module in self.modules:
            for address, count in module.sessions.items():
                module.sessions[address] -= sum(self._chance.random() < 0.01 for _ in range(count))

    def _facts(self, silent: bool) -> Facts:
        if not silent:
            self._told = {f"e{index}": module.census(self.now) for index, module in enumerate(self.modules)}
        censuses = self._told
        counted: dict[str, int] = {}
        for census in censuses.values():
            for address, count in census.sessions.items():
                counted[address] = counted.get(address, 0) + count
        listed = {a: Node(a, Source.STATIC) for a in ADDRESSES}
        own = dict(zip(ADDRESSES, self.sums(), strict=True)) if self.own else {}
        return Facts(
            topologies={
                Source.STATIC: Topology(Source.STATIC, listed, is_complete=True),
                Source.PD: Topology(Source.PD, is_complete=True),
                Source.API: Topology(Source.API, is_complete=True),
            },
            health={
                a: replace(HEALTHY, connections=own.get(a), connections_at=self.now if own else None)
                for a in ADDRESSES
            },
            session_counts=censuses,
            sessions_by_address=counted,
            envoys_last_seen={envoy: census.at for envoy, census in censuses.items()},
            closed_acks=dict.fromkeys(censuses, dict.fromkeys(ADDRESSES, START)),
            new_sessions_per_second=float(self._arrivals),
            migrations={ADDRESSES[0]: {(MOVED, "ok"): sum(module.moved for module in self.modules)}},
        )


def module(number: int, *counts: int, pace: int = 10**9) -> SimulatedModule:
    return SimulatedModule(f"{number:016x}", dict(zip(ADDRESSES, counts, strict=True)), pace)


def joined(*modules: SimulatedModule) -> Site:
    """The last node has been drained, and is taken back after the others have been there for long."""
    site = Site(*modules)
    site.intents = Intents(drains={ADDRESSES[-1]: DrainIntent(START, 600.0)})
    site.seconds(50)
    for each in modules:
        each.moved = 0
    site.asked.clear()
    site.intents = Intents()
    return site


def is_fair(sums: list[int]) -> bool:
    """Nobody has more than a twentieth above its share, nor less than a tenth below it."""
    share = sum(sums) / len(sums)
    return max(sums) <= max(1.05 * share, share + 1) and min(sums) >= min(0.9 * share, share - 1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("total", [7, 60, 900, 9_000])
def test_a_node_that_joins_has_its_share_soon_and_nothing_flaps(seed: int, total: int, own: bool) -> None:
    chance = random.Random(seed)
    modules = []
    for number in range(3):
        there = [chance.randrange(total // 9 + 1) for _ in ADDRESSES[:-1]]
        modules.append(module(number, *there, 0))
    site = joined(*modules)
    site.own = own
    before = site.sums()
    share = sum(before) / len(ADDRESSES)
    lows = before
    for _ in range(60):  # the slow start, and as long again
        site.second()
        lows = [min(low, now) for low, now in zip(lows, site.sums(), strict=True)]
    after = site.sums()
    assert sum(after) == sum(before)
    assert is_fair(after)
    # Nobody has given below its share, not even for a while, but who had less to begin with.
    assert all(low > min(share - 1, had - 1e-6) for low, had in zip(lows, before, strict=True))
    # No session has moved for nothing.
    gained = sum(max(0, now - had) for now, had in zip(after, before, strict=True))
    assert sum(each.moved for each in modules) == gained
    assert site.plan.rebalance.since is None
    quiet = site.plan
    site.seconds(50)
    assert site.sums() == after
    assert site.plan == quiet


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_lives_evens_out_and_then_hardly_moves_anything(seed: int) -> None:
    """20 sessions open a second and live for 100 s: 500 a node, give or take 22 if nobody balanced."""
    site = Site(module(1, 1400, 200, 0, 0), module(2, 100, 0, 300, 0), arrivals=20, seed=seed)
    site.own = True
    site.seconds(20)
    sums = site.sums()
    assert max(sums) / (sum(sums) / 4) < 1.1
    site.asked.clear()
    worst = 0.0
    for _ in range(300):
        site.second()
        worst = max(worst, max(site.sums()) / (sum(site.sums()) / 4))
    assert worst < 1.05
    # 6,000 sessions came and went.
    assert sum(count for _, count in site.asked) < 60


@pytest.mark.parametrize("total", [40, 4000])
def test_rounds_are_apart_so_far_that_each_sees_what_came_of_the_last(total: int) -> None:
    site = Site(module(1, total, 0, 0, 0, pace=5))
    site.seconds(60)
    starts = [at for at, _ in site.asked]
    assert len(starts) > 3
    # Its own length, a second for moves on their way, one until they are counted; and counts are 3 s old.
    lengths = [min(5.0, max(1.0, count / 200)) for _, count in site.asked]
    for (early, late), length in zip(itertools.pairwise(starts), lengths, strict=False):
        assert late - early >= length + 5.0


def test_a_slow_module_is_asked_again_for_what_it_could_not_do() -> None:
    site = joined(module(1, 300, 300, 300, 0, pace=5))
    site.seconds(240)
    assert is_fair(site.sums())
    assert site.plan.rebalance.since is None
    assert site.plan.rebalance.stalled_rounds == 0


def test_sessions_that_cannot_move_are_asked_for_ever_more_rarely() -> None:
    stuck = module(1, 300, 0, 0, 0, pace=0)
    site = Site(stuck)
    site.seconds(600)
    starts = [at for at, _ in site.asked]
    assert starts[-1] - starts[-2] > 100
    assert len(starts) < 12
    stuck.pace = 10**9
    site.seconds(310)
    assert is_fair(site.sums())


def test_without_reports_it_stops_and_with_them_it_goes_on() -> None:
    site = joined(module(1, 300, 300, 300, 0), module(2, 90, 90, 90, 0))
    site.seconds(1)
    rounds = len(site.asked)
    for _ in range(60):
        site.second(silent=True)
    assert len(site.asked) == rounds
    assert not site.plan.rebalance.outgoing
    assert site.plan.rebalance.reason == "no Envoy has a module that could be asked"
    site.seconds(10)
    assert len(site.asked) > rounds


def test_rolling_restarts_end_with_fair_shares() -> None:
    site = joined(module(1, 100, 100, 100, 0), module(2, 50, 50, 50, 0))
    site.seconds(100)
    for address in ADDRESSES:
        site.intents = Intents(drains={address: DrainIntent(site.now, 600.0)})
        site.seconds(10)
        site.intents = Intents()
        site.seconds(45)
    site.seconds(40)
    assert is_fair(site.sums())
    assert site.plan.rebalance.since is None
