"""The stamp (term, serial) of the current plan, and the stamp at which each node was closed."""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.plan import Plan, Stamp

_NO_STAMP: Stamp = (0, 0)


class PlanGeneration:
    """Tracks the stamp of the plan. `base_stamp` is the stamp of the shared plan that ours derives from."""

    def __init__(self) -> None:
        self.stamp: Stamp | None = None  # None: this plan is not shared
        self.base_stamp: Stamp = _NO_STAMP
        self.intents_version = 0  # the version of the intents that the last shared plan applies
        self._term: int | None = None  # the term in which this replica leads
        self._is_standalone = False  # decided for its own Envoys since the last plan of a leader
        # address -> (closed at, stamp of the closing plan)
        self._closed: dict[str, tuple[float, Stamp | None]] = {}

    @property
    def is_leader(self) -> bool:
        """Whether this replica decides for all replicas."""
        return self._term is not None

    @property
    def closed(self) -> Collection[str]:
        """The nodes that the plan closes to new sessions."""
        return self._closed.keys()

    def known_closed(self, stamp: Stamp | None) -> Collection[str]:
        """Return the nodes that are closed now and already were in the plan with this stamp."""
        if stamp is None:
            return ()
        return [
            address for address, (_, since) in self._closed.items() if since is not None and since <= stamp
        ]

    def adopt(self, plan: Plan, stamp: Stamp, intents_version: int = 0) -> None:
        """Adopt a plan of a leader."""
        self._term, self._is_standalone = None, False
        self.base_stamp = stamp
        self.stamp = stamp if stamp > _NO_STAMP else None
        self.intents_version = intents_version
        self._update_closed(plan)

    def become_leader(self, term: int, plan: Plan) -> None:
        """Start to lead in a term, possibly again in the same term. Stamps never decrease."""
        self._term, self._is_standalone = term, False
        self.stamp = self.base_stamp = max((term, 1), (self.base_stamp[0], self.base_stamp[1] + 1))
        for address, (at, since) in self._closed.items():
            self._closed[address] = (at, since or self.stamp)
        self._update_closed(plan)

    def go_standalone(self) -> None:
        """From now on decide only for the Envoys that are connected here."""
        self._term, self.stamp, self._is_standalone = None, None, True

    def advance(self, plan: Plan, intents_version: int = 0) -> None:
        """Advance the serial: the plan has changed, or an equal plan applies newer intents."""
        if self._term is not None:
            self.stamp = self.base_stamp = (self._term, self.base_stamp[1] + 1)
            self.intents_version = intents_version
        self._update_closed(plan)

    def is_newer(self, stamp: Stamp, term: int) -> bool:
        """Return whether a plan of the leader of `term` replaces ours.

        After standalone decisions, any plan of that term does; otherwise only a newer plan.
        """
        return stamp[0] == term if self._is_standalone else stamp > self.base_stamp

    def _update_closed(self, plan: Plan) -> None:
        # Compare the closing times: the node may have been open in a plan that was not seen here.
        before, self._closed = self._closed, {}
        for address, planned in plan.nodes.items():
            if (at := planned.closed_since) is not None:
                previous = before.get(address)
                is_same = previous is not None and previous[0] == at
                self._closed[address] = previous if previous is not None and is_same else (at, self.stamp)
