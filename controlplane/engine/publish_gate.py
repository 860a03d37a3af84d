"""Decides when the first plan after a start may be published, so that Envoys lose no valid endpoints."""

from __future__ import annotations

from controlplane.decide.node_sources import all_sources_complete
from controlplane.decide.plan import has_completed_first_checks
from controlplane.model.facts import Facts
from controlplane.model.plan import Plan, Policy

# How long to wait for the first checks of the nodes after all sources are complete.
_FIRST_CHECKS_TIMEOUT_SECONDS = 3.0


class InitialPublishGate:
    """Opens once, and stays open.

    A saved plan is published at once. Without one, the gate waits until all sources are complete and every
    node was checked once: until then the nodes look absent, and an Envoy may know more than we do.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_skipped = False
        self._sources_complete_at: float | None = None

    def skip(self) -> None:
        """Open at the next attempt: there is a saved or shared plan."""
        self.is_skipped = True

    def try_open(self, plan: Plan, facts: Facts, policy: Policy, now: float) -> bool:
        """Open the gate if the plan is complete; return whether this call opened it."""
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
