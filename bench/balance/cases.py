"""The simulated cases: fleets, their sessions, and changes during the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TopologyChange:
    """Nodes that join or are drained at the same time."""

    at_fraction: float  # time of the change, as a fraction of the measured time
    joins: int = 0
    leaves: int = 0

    @property
    def name(self) -> str:
        count, verb = (self.joins, "join") if self.joins else (self.leaves, "leave")
        return f"{count} nodes {verb}" if count > 1 else f"{count} node {verb}s"


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet and its load. Times are in seconds.

    Sessions arrive at random (Poisson), at a rate that keeps `sessions` of them open. The lifetimes of
    half of them are exponential with a tenth of the mean `lifetime`. Those of the others are lognormal with a
    heavy tail (sigma 1.5).
    """

    letter: str
    description: str
    envoys: int = 200
    nodes: int = 50
    sessions: int = 1_800
    lifetime: float = 600.0  # mean
    direct_fraction: float = 0.0  # fraction of the sessions that bypass all Envoys
    direct_nodes: int = 16  # number of nodes that get direct sessions
    pools: int = 20  # number of client pools; a pool closes all its sessions at once
    pool_close_interval: float | None = None  # mean time between two pool closes; None: never
    arrival_factor: float = 1.0  # multiplies the arrival rate to compensate for closed pools
    skew: float = 0.0  # Envoys get new sessions in proportion to 1 / rank ** skew
    changes: tuple[TopologyChange, ...] = ()
    slow_nodes: int = 0  # number of nodes on which sessions last `slowness` times as long
    slowness: float = 3.0
    half_weight_nodes: int = 0  # number of nodes with half the weight
    report_delay: float = 1.0  # minimum delay of a report
    report_delay_spread: float = 0.0  # maximum of the additional random delay
    silent_envoys: int = 0  # number of Envoys that report nothing for 30 s; chosen at random every 60 s

    @property
    def arrivals(self) -> float:
        """New sessions per second, including direct ones."""
        return self.arrival_factor * self.sessions / self.lifetime


_BASE_CASE = Case("a", "200 Envoys, 50 nodes, 1,800 sessions")
# 10 % of the sessions connect to nodes directly, not through an Envoy.
_DIRECT_CASE = replace(
    _BASE_CASE,
    letter="b",
    description="as a, and 10 % of the sessions come past the fleet",
    direct_fraction=0.1,
)
# A client pool (5 % of the sessions) closes all its sessions together; Envoys get new sessions by Zipf's law.
_BURSTS_CASE = replace(
    _BASE_CASE,
    letter="c",
    description="as a, pools of 5 % close at once, arrivals by Zipf's law",
    pool_close_interval=120.0,
    arrival_factor=1.65,
    skew=1.0,
)
_ALTERNATING_CHANGES = tuple(
    TopologyChange((2 * i + 1) / 16, joins=(i + 1) % 2, leaves=i % 2) for i in range(8)
)

CASES = {
    case.letter: case
    for case in (
        _BASE_CASE,
        _DIRECT_CASE,
        _BURSTS_CASE,
        Case("d", "20 Envoys, 50 nodes, 100,000 sessions", envoys=20, sessions=100_000, lifetime=1_200.0),
        replace(
            _BASE_CASE,
            letter="e",
            description="as a, and nodes join and leave",
            changes=(
                TopologyChange(0.1, joins=1),
                TopologyChange(0.3, leaves=1),
                TopologyChange(0.5, joins=10),
                TopologyChange(0.75, leaves=10),
            ),
        ),
        replace(
            _BASE_CASE,
            letter="f",
            description="as a, 5 nodes three times as slow, 10 of half the weight",
            slow_nodes=5,
            half_weight_nodes=10,
        ),
        replace(
            _BURSTS_CASE,
            letter="g",
            description="b and c together, and nodes join and leave",
            arrival_factor=1.6,
            direct_fraction=0.1,
            changes=_ALTERNATING_CHANGES,
        ),
        replace(
            _BASE_CASE,
            letter="h",
            description="as a, reports up to 3 s late, Envoys silent for 30 s",
            report_delay=0.5,
            report_delay_spread=2.5,
            silent_envoys=5,
        ),
    )
}
