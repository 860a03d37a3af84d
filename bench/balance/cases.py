"""What is simulated: fleets, the sessions that come to them, and what happens to them meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that join, and nodes that are drained, at one moment."""

    at: float  # as a part of the time that is measured
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
    about: str
    envoys: int = 200
    nodes: int = 50
    sessions: int = 1_800
    lifetime: float = 600.0  # mean
    direct: float = 0.0  # the part of the sessions that come past all Envoys
    direct_nodes: int = 16  # how many nodes these come to
    pools: int = 20  # clients that close all their sessions at once are so many ...
    pool_closes: float | None = None  # ... and one of them does this often on average; None: none does
    made_up: float = 1.0  # so many times the sessions come for that, since there would be fewer
    skew: float = 0.0  # Envoys get new sessions in proportion to 1 / rank ** skew
    changes: tuple[Change, ...] = ()
    slow_nodes: int = 0  # on which sessions last ...
    slowness: float = 3.0  # ... so many times as long
    half_nodes: int = 0  # nodes of half the weight
    delay: float = 1.0  # how late a report arrives, at least
    delay_spread: float = 0.0  # and what may come on top of it
    silent: int = 0  # Envoys that report nothing for 30 s, others every 60 s

    @property
    def arrivals(self) -> float:
        """New sessions per second, also those that come past all Envoys."""
        return self.made_up * self.sessions / self.lifetime


_PLAIN = Case("a", "200 Envoys, 50 nodes, 1,800 sessions")
_DIRECT = replace(_PLAIN, letter="b", about="as a, and 10 % of the sessions come past the fleet", direct=0.1)
_BURSTS = replace(
    _PLAIN,
    letter="c",
    about="as a, pools of 5 % close at once, arrivals by Zipf's law",
    pool_closes=120.0,
    made_up=1.65,
    skew=1.0,
)
_ONE_EACH = tuple(Change((2 * i + 1) / 16, joins=(i + 1) % 2, leaves=i % 2) for i in range(8))

CASES = {
    case.letter: case
    for case in (
        _PLAIN,
        _DIRECT,
        _BURSTS,
        Case("d", "20 Envoys, 50 nodes, 100,000 sessions", envoys=20, sessions=100_000, lifetime=1_200.0),
        replace(
            _PLAIN,
            letter="e",
            about="as a, and nodes join and leave",
            changes=(
                Change(0.1, joins=1),
                Change(0.3, leaves=1),
                Change(0.5, joins=10),
                Change(0.75, leaves=10),
            ),
        ),
        replace(
            _PLAIN,
            letter="f",
            about="as a, 5 nodes three times as slow, 10 of half the weight",
            slow_nodes=5,
            half_nodes=10,
        ),
        replace(
            _BURSTS,
            letter="g",
            about="b and c together, and nodes join and leave",
            made_up=1.6,
            direct=0.1,
            changes=_ONE_EACH,
        ),
        replace(
            _PLAIN,
            letter="h",
            about="as a, reports up to 3 s late, Envoys silent for 30 s",
            delay=0.5,
            delay_spread=2.5,
            silent=5,
        ),
    )
}
