"""Which plan it is that Envoys are offered, and since which one nodes are closed to new sessions."""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.plan import Plan, Stamp

_NO_STAMP: Stamp = (0, 0)


class PlanGeneration:
    """Keeps the stamp of the plan. `origin` is that of the last shared plan that ours is made of."""

    def __init__(self) -> None:
        self.stamp: Stamp | None = None  # None: nobody else knows of this plan
        self.base_stamp: Stamp = _NO_STAMP
        self.intents_version = 0  # that the last shared plan heeds
        self._term: int | None = None  # in which we lead
        self._is_standalone = False  # we have decided by ourselves since the last plan of a leader
        self._closed: dict[str, tuple[float, Stamp | None]] = {}  # with when it was closed

    @property
    def is_leader(self) -> bool:
        """Whether what is decided is for all."""
        return self._term is not None

    @property
    def closed(self) -> Collection[str]:
        """The nodes that the plan keeps new sessions off."""
        return self._closed.keys()

    def known_closed(self, stamp: Stamp | None) -> Collection[str]:
        """The nodes that are closed now, and were in the plan of that stamp, too."""
        if stamp is None:
            return ()
        return [
            address for address, (_, since) in self._closed.items() if since is not None and since <= stamp
        ]

    def adopt(self, plan: Plan, stamp: Stamp, intents_version: int = 0) -> None:
        """It is a leader's plan."""
        self._term, self._is_standalone = None, False
        self.base_stamp = stamp
        self.stamp = stamp if stamp > _NO_STAMP else None
        self.intents_version = intents_version
        self._update_closed(plan)

    def become_leader(self, term: int, plan: Plan) -> None:
        """We lead from now on, or again in the same term: numbers never fall."""
        self._term, self._is_standalone = term, False
        self.stamp = self.base_stamp = max((term, 1), (self.base_stamp[0], self.base_stamp[1] + 1))
        for address, (at, since) in self._closed.items():
            self._closed[address] = (at, since or self.stamp)
        self._update_closed(plan)

    def go_standalone(self) -> None:
        """What is decided from now on is for our own Envoys."""
        self._term, self.stamp, self._is_standalone = None, None, True

    def advance(self, plan: Plan, intents_version: int = 0) -> None:
        """We have made another plan, or one that looks the same and heeds more."""
        if self._term is not None:
            self.stamp = self.base_stamp = (self._term, self.base_stamp[1] + 1)
            self.intents_version = intents_version
        self._update_closed(plan)

    def is_newer(self, stamp: Stamp, term: int) -> bool:
        """Whether the plan of a leader is to take the place of ours, when the leader's term is that one.

        When we have strayed, that is one of that term, known or not; else any later one.
        """
        return stamp[0] == term if self._is_standalone else stamp > self.base_stamp

    def _update_closed(self, plan: Plan) -> None:
        # A node may have been open in between, in plans that we have not seen.
        before, self._closed = self._closed, {}
        for address, planned in plan.nodes.items():
            if (at := planned.closed_since) is not None:
                known = before.get(address)
                self._closed[address] = known if known is not None and known[0] == at else (at, self.stamp)
