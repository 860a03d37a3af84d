"""Rebalancing of a simulated fleet over many rounds: it reaches fair shares soon, and then migrations end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from controlplane.decide.plan import compute_plan
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
class RoundQuota:
    """How many sessions one Envoy may still migrate per node in the current round."""

    rounds: dict[str, int] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)

    def update(self, number: int, requested: Mapping[str, Mapping[str, int]], instance: str) -> None:
        for address in ADDRESSES:
            if address not in requested:
                self.remaining[address] = 0
                self.rounds.pop(address, None)
            elif self.rounds.get(address) != number:
                self.rounds[address] = number
                self.remaining[address] = requested[address].get(instance, 0)


@dataclass
class SimulatedModule:
    """The module of an Envoy: it migrates the requested sessions to the requested nodes."""

    instance: str
    sessions: dict[str, int]
    rate: int = 10**9  # migrations per second and node
    migrated: int = 0
    outgoing: RoundQuota = field(default_factory=RoundQuota)
    incoming: RoundQuota = field(default_factory=RoundQuota)
    history: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)

    def apply(self, planned: Plan) -> None:
        rebalance = planned.rebalance
        self.outgoing.update(rebalance.round, rebalance.outgoing, self.instance)
        self.incoming.update(rebalance.round, rebalance.incoming, self.instance)
        for address in self.sessions:
            is_draining = planned.nodes[address].state is State.DRAINING
            count = (
                self.sessions[address] if is_draining else min(self.outgoing.remaining[address], self.rate)
            )
            for _ in range(count):
                targets = None if is_draining else {a for a, n in self.incoming.remaining.items() if n}
                if targets is None or targets:
                    self._migrate(address, planned, targets)

    def _migrate(self, address: str, planned: Plan, targets: Collection[str] | None) -> None:
        """Migrate a session to one of the targets, or to any node in service if `targets` is None."""
        weights = {
            a: p.weight
            for a, p in planned.nodes.items()
            if p.weight and a != address and (targets is None or a in targets)
        }
        target = min(weights, key=lambda a: (self.sessions[a] + 1) / weights[a])
        self.sessions[address] -= 1
        self.sessions[target] += 1
        self.migrated += 1
        if targets is not None:
            self.outgoing.remaining[address] -= 1
            self.incoming.remaining[target] -= 1

    def record(self, now: float) -> None:
        self.history = [*self.history[-4:], (now, dict(self.sessions))]

    def session_counts(self, now: float) -> SessionCounts:
        """Return the counts of one second ago. They are reported as up to three seconds old."""
        visible = [entry for entry in self.history if entry[0] <= now - 1.0]
        return SessionCounts(now, now - 3.0, visible[-1][1], frozenset(ADDRESSES), instance=self.instance)


class SimulatedFleet:
    """Nodes, Envoys and a control plane, simulated second by second."""

    def __init__(self, *modules: SimulatedModule, arrivals: int = 0, seed: int = 0) -> None:
        """Each second, `arrivals` sessions open and 1 % of all sessions end. If it is 0, none ends."""
        self.modules = modules
        self.now = START
        self.plan = Plan()
        self.intents = Intents()
        self.rounds_started: list[tuple[float, int]] = []  # start times and sizes of rounds
        self.tidb_counts = False  # whether nodes report their own counts
        self._reports: dict[str, SessionCounts] = {}
        self._arrivals, self._rng = arrivals, random.Random(seed)
        for module in modules:
            module.record(self.now - 10.0)

    def sessions_per_node(self) -> list[int]:
        return [sum(module.sessions[a] for module in self.modules) for a in ADDRESSES]

    def advance_one_second(self, *, silent: bool = False) -> None:
        self.now += 1.0
        round_before = self.plan.rebalance.round
        self.plan = compute_plan(self.plan, self._facts(silent), self.intents, POLICY, self.now)
        if self.plan.rebalance.round != round_before:
            count = sum(sum(by_envoy.values()) for by_envoy in self.plan.rebalance.outgoing.values())
            self.rounds_started.append((self.now, count))
        self._open_and_end_sessions()
        for module in self.modules:
            module.apply(self.plan)
            module.record(self.now)

    def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.advance_one_second()

    def _open_and_end_sessions(self) -> None:
        if not self._arrivals:
            return
        weights = [p.weight for p in self.plan.nodes.values()]
        for address in self._rng.choices(list(self.plan.nodes), weights, k=self._arrivals):
            self._rng.choice(self.modules).sessions[address] += 1
        for module in self.modules:
            for address, count in module.sessions.items():
                module.sessions[address] -= sum(self._rng.random() < 0.01 for _ in range(count))

    def _facts(self, silent: bool) -> Facts:
        if not silent:
            self._reports = {
                f"e{index}": module.session_counts(self.now) for index, module in enumerate(self.modules)
            }
        reports = self._reports
        sums: dict[str, int] = {}
        for report in reports.values():
            for address, count in report.sessions.items():
                sums[address] = sums.get(address, 0) + count
        nodes = {a: Node(a, Source.STATIC) for a in ADDRESSES}
        connections = dict(zip(ADDRESSES, self.sessions_per_node(), strict=True)) if self.tidb_counts else {}
        counted_at = self.now if connections else None
        return Facts(
            topologies={
                Source.STATIC: Topology(Source.STATIC, nodes, is_complete=True),
                Source.PD: Topology(Source.PD, is_complete=True),
                Source.API: Topology(Source.API, is_complete=True),
            },
            health={
                a: replace(HEALTHY, connections=connections.get(a), connections_at=counted_at)
                for a in ADDRESSES
            },
            session_counts=reports,
            sessions_by_address=sums,
            envoys_last_seen={envoy: report.at for envoy, report in reports.items()},
            closed_acks=dict.fromkeys(reports, dict.fromkeys(ADDRESSES, START)),
            new_sessions_per_second=float(self._arrivals),
            migrations={ADDRESSES[0]: {(MOVED, "ok"): sum(module.migrated for module in self.modules)}},
        )


def module(number: int, *counts: int, rate: int = 10**9) -> SimulatedModule:
    return SimulatedModule(f"{number:016x}", dict(zip(ADDRESSES, counts, strict=True)), rate)


def fleet_with_joining_node(*modules: SimulatedModule) -> SimulatedFleet:
    """Return a fleet whose last node has just been undrained, long after the others started."""
    fleet = SimulatedFleet(*modules)
    fleet.intents = Intents(drains={ADDRESSES[-1]: DrainIntent(START, 600.0)})
    fleet.advance(50)
    for module in modules:
        module.migrated = 0
    fleet.rounds_started.clear()
    fleet.intents = Intents()
    return fleet


def is_fair(sums: list[int]) -> bool:
    """Return whether no node is more than 5 % above or 10 % below its share."""
    share = sum(sums) / len(sums)
    return max(sums) <= max(1.05 * share, share + 1) and min(sums) >= min(0.9 * share, share - 1)


@pytest.mark.parametrize("tidb_counts", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("total", [7, 60, 900, 9_000])
def test_joining_node_reaches_its_share_without_flapping(seed: int, total: int, tidb_counts: bool) -> None:
    rng = random.Random(seed)
    modules = []
    for number in range(3):
        counts = [rng.randrange(total // 9 + 1) for _ in ADDRESSES[:-1]]
        modules.append(module(number, *counts, 0))
    fleet = fleet_with_joining_node(*modules)
    fleet.tidb_counts = tidb_counts
    before = fleet.sessions_per_node()
    share = sum(before) / len(ADDRESSES)
    lows = before
    for _ in range(60):  # twice the duration of the slow start
        fleet.advance_one_second()
        lows = [min(low, now) for low, now in zip(lows, fleet.sessions_per_node(), strict=True)]
    after = fleet.sessions_per_node()
    assert sum(after) == sum(before)
    assert is_fair(after)
    # No node drops below its share at any time, except nodes that began below their share.
    assert all(low > min(share - 1, first - 1e-6) for low, first in zip(lows, before, strict=True))
    # No migration was superfluous.
    gained = sum(max(0, last - first) for last, first in zip(after, before, strict=True))
    assert sum(m.migrated for m in modules) == gained
    assert fleet.plan.rebalance.since is None
    settled = fleet.plan
    fleet.advance(50)
    assert fleet.sessions_per_node() == after
    assert fleet.plan == settled


@pytest.mark.parametrize("seed", range(3))
def test_busy_fleet_evens_out_with_few_migrations(seed: int) -> None:
    """20 sessions open per second and last 100 s: 500 per node. The standard deviation by chance is 22."""
    fleet = SimulatedFleet(module(1, 1400, 200, 0, 0), module(2, 100, 0, 300, 0), arrivals=20, seed=seed)
    fleet.tidb_counts = True
    fleet.advance(20)
    sessions = fleet.sessions_per_node()
    assert max(sessions) / (sum(sessions) / 4) < 1.1
    fleet.rounds_started.clear()
    worst = 0.0
    for _ in range(300):
        fleet.advance_one_second()
        worst = max(worst, max(fleet.sessions_per_node()) / (sum(fleet.sessions_per_node()) / 4))
    assert worst < 1.05
    # About 6,000 sessions opened, and as many ended.
    assert sum(count for _, count in fleet.rounds_started) < 60


@pytest.mark.parametrize("total", [40, 4000])
def test_rounds_are_far_enough_apart_to_see_results(total: int) -> None:
    fleet = SimulatedFleet(module(1, total, 0, 0, 0, rate=5))
    fleet.advance(60)
    starts = [at for at, _ in fleet.rounds_started]
    assert len(starts) > 3
    # After a round, migrations end within 1 s and are counted within 1 s more. Counts may be 3 s old.
    lengths = [min(5.0, max(1.0, count / 200)) for _, count in fleet.rounds_started]
    for (early, late), length in zip(itertools.pairwise(starts), lengths, strict=False):
        assert late - early >= length + 5.0


def test_slow_module_is_asked_again() -> None:
    fleet = fleet_with_joining_node(module(1, 300, 300, 300, 0, rate=5))
    fleet.advance(240)
    assert is_fair(fleet.sessions_per_node())
    assert fleet.plan.rebalance.since is None
    assert fleet.plan.rebalance.stalled_rounds == 0


def test_envoy_with_few_sessions_gives_some_if_those_of_others_cannot_migrate() -> None:
    fleet = SimulatedFleet(module(1, 10, 8, 8, 4, rate=0), module(2, 2, 2, 2, 4))
    fleet.advance(60)
    assert fleet.sessions_per_node() == [10, 10, 10, 10]


def test_pauses_grow_while_no_session_migrates() -> None:
    stuck = module(1, 300, 0, 0, 0, rate=0)
    fleet = SimulatedFleet(stuck)
    fleet.advance(600)
    starts = [at for at, _ in fleet.rounds_started]
    assert starts[-1] - starts[-2] > 100
    assert len(starts) < 12
    stuck.rate = 10**9
    fleet.advance(310)
    assert is_fair(fleet.sessions_per_node())


def test_rebalancing_stops_without_reports_and_resumes() -> None:
    fleet = fleet_with_joining_node(module(1, 300, 300, 300, 0), module(2, 90, 90, 90, 0))
    fleet.advance(1)
    rounds = len(fleet.rounds_started)
    for _ in range(60):
        fleet.advance_one_second(silent=True)
    assert len(fleet.rounds_started) == rounds
    assert not fleet.plan.rebalance.outgoing
    assert fleet.plan.rebalance.reason == "no Envoy has a module that can migrate sessions"
    fleet.advance(10)
    assert len(fleet.rounds_started) > rounds


def test_rolling_restarts_end_with_fair_shares() -> None:
    fleet = fleet_with_joining_node(module(1, 100, 100, 100, 0), module(2, 50, 50, 50, 0))
    fleet.advance(100)
    for address in ADDRESSES:
        fleet.intents = Intents(drains={address: DrainIntent(fleet.now, 600.0)})
        fleet.advance(10)
        fleet.intents = Intents()
        fleet.advance(45)
    fleet.advance(40)
    assert is_fair(fleet.sessions_per_node())
    assert fleet.plan.rebalance.since is None
