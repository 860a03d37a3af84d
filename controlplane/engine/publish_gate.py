"""When the first plan after a start may go out: it must not take away what Envoys rightly hold."""

from __future__ import annotations

from controlplane.decide.node_sources import all_sources_complete
from controlplane.decide.plan import has_completed_first_checks
from controlplane.model.facts import Facts
from controlplane.model.plan import Plan, Policy

# Seconds that the first checks of the nodes are waited for, once it is known which nodes there are.
_FIRST_CHECKS_TIMEOUT_SECONDS = 3.0


class InitialPublishGate:
    """Opens once, and stays open.

    A plan that was saved goes out at once. Without one, an Envoy may know more than we do until all sources
    have said which nodes there are, and each node has been checked once: until then they look absent.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_skipped = False
        self._sources_complete_at: float | None = None

    def skip(self) -> None:
        """A saved plan is there: nothing has to be waited for."""
        self.is_skipped = True

    def try_open(self, plan: Plan, facts: Facts, policy: Policy, now: float) -> bool:
        """Whether this is the moment at which it opens."""
        if self.is_open:
            return False
        if all_sources_complete(facts) and self._sources_complete_at is None:
            self._sources_complete_at = now
        sources_complete = self._sources_complete_at is not None
        timed_out = (
            self._sources_complete_at is not None
            and now - self._sources_complete_at > _FIRST_CHECKS_TIMEOUT_SECONDS
        )
        self.is_open = (
            self.is_skipped
            or timed_out
            or (sources_complete and has_completed_first_checks(plan, facts, policy))
        )
        return self.is_open
