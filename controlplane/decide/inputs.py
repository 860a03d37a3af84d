"""The inputs from which the next plan is computed. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controlplane.model.facts import Facts
from controlplane.model.module_switches import NO_OVERRIDES, SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import Plan, Policy


class Inputs(NamedTuple):
    """The inputs of the next plan, except the intents of operators."""

    previous: Plan  # the last plan; after a restart, the saved one
    facts: Facts
    policy: Policy
    now: float
    switch_overrides: Mapping[str, SwitchOverrides] = EMPTY_MAP  # by Envoy id

    def may_migrate_sessions(self, envoy: str) -> bool:
        """Whether migrations are switched on for an Envoy."""
        overrides = self.switch_overrides.get(envoy, NO_OVERRIDES)
        report = self.facts.module_reports.get(envoy)
        is_off_by_runtime = report is not None and "migration" in report.runtime_off
        return overrides.apply_to(self.policy.module_switches).migration and not is_off_by_runtime

    @property
    def tidb_counts_stale_before(self) -> float:
        """A session count that a TiDB server reported before this time is stale."""
        return self.now - 3 * max(self.policy.status_interval, 1.0)

    @property
    def reports_stale_before(self) -> float:
        """An Envoy's report from before this time is stale."""
        return self.now - max(5.0, 3 * self.policy.report_interval)
