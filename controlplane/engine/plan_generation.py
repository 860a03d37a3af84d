"""The stamp (leader's term, serial) of the current plan and of the plan that closed each node.

Stamps order the plans of all replicas of the control plane. A closed node gets no new sessions.
"""

from __future__ import annotations

from collections.abc import Collection

from controlplane.model.plan import Plan, Stamp

_NO_STAMP: Stamp = (0, 0)


class PlanGeneration:
    """Tracks the stamp of the plan, and `last_shared_stamp`: of the last plan that all replicas share."""

    def __init__(self) -> None:
        self.stamp: Stamp | None = None  # None: the plan is not shared with other replicas
        self.last_shared_stamp: Stamp = _NO_STAMP
        self.intents_version = 0  # the version of the intents that the plan applies
        self._term: int | None = None  # the term in which this replica leads; None: it does not lead
        # Whether this replica has planned only for its own Envoys since it had a plan of a leader.
        self.is_standalone = False
        # address -> (time of closing, stamp of the plan that closed the node)
        self._closed: dict[str, tuple[float, Stamp | None]] = {}

    @property
    def closed(self) -> Collection[str]:
        """The addresses of the nodes that are closed to new sessions."""
        return self._closed.keys()

    def closed_since_plan(self, stamp: Stamp | None) -> Collection[str]:
        """Return the nodes that have been closed at least since the plan with this stamp."""
        if stamp is None:
            return ()
        return [
            address for address, (_, since) in self._closed.items() if since is not None and since <= stamp
        ]

    def adopt(self, plan: Plan, stamp: Stamp, intents_version: int = 0) -> None:
        """Adopt the plan of another replica that is the leader, or a saved plan."""
        self._term, self.is_standalone = None, False
        self.last_shared_stamp = stamp
        self.stamp = stamp if stamp > _NO_STAMP else None
        self.intents_version = intents_version
        self._update_closed(plan)

    def become_leader(self, term: int, plan: Plan) -> None:
        """Become the leader of a term, possibly of the same term again. Stamps never decrease."""
        self._term, self.is_standalone = term, False
        last_term, last_serial = self.last_shared_stamp
        self.stamp = self.last_shared_stamp = max((term, 1), (last_term, last_serial + 1))
        for address, (at, since) in self._closed.items():
            self._closed[address] = (at, since or self.stamp)
        self._update_closed(plan)

    def go_standalone(self) -> None:
        """Start to plan only for the Envoys that are connected to this replica; the plan gets no stamp."""
        self._term, self.stamp, self.is_standalone = None, None, True

    def advance(self, plan: Plan, intents_version: int = 0) -> None:
        """Advance the serial because the plan has changed, or because an equal plan applies other intents."""
        if self._term is not None:
            self.stamp = self.last_shared_stamp = (self._term, self.last_shared_stamp[1] + 1)
        self.intents_version = intents_version
        self._update_closed(plan)

    def is_newer(self, stamp: Stamp, term: int) -> bool:
        """Return whether a plan with this stamp from the leader of `term` replaces the current plan.

        After standalone plans, any plan of this term replaces it; otherwise, only a newer plan does.
        """
        return stamp[0] == term if self.is_standalone else stamp > self.last_shared_stamp

    def _update_closed(self, plan: Plan) -> None:
        # Closing times are compared because a plan that this replica never got may have reopened the node.
        before, self._closed = self._closed, {}
        for address, planned in plan.nodes.items():
            if (at := planned.closed_since) is not None:
                previous = before.get(address)
                is_same = previous is not None and previous[0] == at
                self._closed[address] = previous if previous is not None and is_same else (at, self.stamp)
