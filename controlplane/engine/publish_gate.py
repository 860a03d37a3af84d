"""When the first plan after a start may go out: it must not take away what Envoys rightly hold."""

from __future__ import annotations

from controlplane.decide.node_sources import complete
from controlplane.decide.plan import checked
from controlplane.model.facts import Facts
from controlplane.model.plan import Plan, Policy

# Seconds that the first checks of the nodes are waited for, once it is known which nodes there are.
_FIRST_CHECKS = 3.0


class FirstPublish:
    """Opens once, and stays open.

    A plan that was saved goes out at once. Without one, an Envoy may know more than we do until all sources
    have said which nodes there are, and each node has been checked once: until then they look absent.
    """

    def __init__(self) -> None:
        self.open = False
        self.is_waived = False
        self._listed_at: float | None = None

    def waive(self) -> None:
        """A saved plan is there: nothing has to be waited for."""
        self.is_waived = True

    def opens(self, plan: Plan, facts: Facts, policy: Policy, now: float) -> bool:
        """Whether this is the moment at which it opens."""
        if self.open:
            return False
        if complete(facts) and self._listed_at is None:
            self._listed_at = now
        listed = self._listed_at is not None
        waited = self._listed_at is not None and now - self._listed_at > _FIRST_CHECKS
        self.open = self.is_waived or waited or (listed and checked(plan, facts, policy))
        return self.open
