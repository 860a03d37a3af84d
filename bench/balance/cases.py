"""What is simulated: fleets, the sessions that come to them, and what happens to them meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TopologyChange:
    """Nodes that join, and nodes that are drained, at one moment."""

    at_fraction: float  # as a part of the time that is measured
    joins: int = 0
    leaves: int = 0

    @property
    def name(self) -> str:
        """What happens, in words."""
        count, does = (self.joins, "join") if self.joins else (self.leaves, "leave")
        return f"{count} {'nodes' if count > 1 else 'node'} {does if count > 1 else does + 's'}"


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet and its load. Times in seconds.

    Sessions come at random (Poisson), at a rate at which there are `sessions` of them at a time. Half of them
    last a tenth of the mean (exponential), the others are lognormal with a heavy tail (sigma 1.5).
    """

    letter: str
    description: str
    envoys: int = 200
    nodes: int = 50
    sessions: int = 1_800
    lifetime: float = 600.0  # mean
    direct_fraction: float = 0.0  # the part of the sessions that come past all Envoys
    direct_nodes: int = 16  # how many nodes these come to
    pools: int = 20  # clients that close all their sessions at once are so many ...
    pool_close_interval: float | None = (
        None  # ... and one of them does this often on average; None: none does
    )
    arrival_factor: float = 1.0  # so many times the sessions come for that, since there would be fewer
    skew: float = 0.0  # Envoys get new sessions in proportion to 1 / rank ** skew
    changes: tuple[TopologyChange, ...] = ()
    slow_nodes: int = 0  # on which sessions last ...
    slowness: float = 3.0  # ... so many times as long
    half_weight_nodes: int = 0  # nodes of half the weight
    report_delay: float = 1.0  # how late a report arrives, at least
    report_delay_spread: float = 0.0  # and what may come on top of it
    silent_envoys: int = 0  # Envoys that report nothing for 30 s, others every 60 s

    @property
    def arrivals(self) -> float:
        """New sessions per second, also those that come past all Envoys."""
        return self.arrival_factor * self.sessions / self.lifetime


_BASE_CASE = Case("a", "200 Envoys, 50 nodes, 1,800 sessions")
_DIRECT_CASE = replace(
    _BASE_CASE,
    letter="b",
    description="as a, and 10 % of the sessions come past the fleet",
    direct_fraction=0.1,
)
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
