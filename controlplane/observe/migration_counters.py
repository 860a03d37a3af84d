"""Counts migration attempts by node, across restarts of the reporting Envoys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from controlplane.model.traffic import MigrationCounts, ModuleReport


class _EnvoyCounters:
    """The latest counters of one Envoy, by node."""

    def __init__(self) -> None:
        self.instance = ""
        self.counts_by_node: dict[str, dict[tuple[str, str], int]] = {}
        self.forgotten_nodes: set[str] = set()  # forgotten here, but not in the Envoy


class MigrationCounters:
    """Sums by node that never decrease, although the counters of a restarted Envoy restart at zero.

    The first report of an Envoy process is the baseline: its counts may be of any age, so the sums contain
    only what the process counts later. The same applies to the first report after `forget_envoy`.
    """

    def __init__(self) -> None:
        self._envoy_counters: dict[str, _EnvoyCounters] = {}  # by Envoy
        self._totals: dict[str, dict[tuple[str, str], int]] = {}
        self.totals: Mapping[str, MigrationCounts] = MappingProxyType(self._totals)

    def add_report(self, report: ModuleReport) -> None:
        """Add the increase since the previous report of the same Envoy."""
        counters = self._envoy_counters.get(report.envoy)
        # A stream may continue after `forget_envoy`. Its next report is then the first one again.
        is_first_report = report.is_first or counters is None
        if counters is None or (report.is_first and report.instance != counters.instance):
            counters = self._envoy_counters[report.envoy] = _EnvoyCounters()
        counters.instance = report.instance
        for node, migrations in report.migrations.items():
            is_first = is_first_report or node in counters.forgotten_nodes
            counters.forgotten_nodes.discard(node)
            self._add_node(node, counters.counts_by_node.setdefault(node, {}), migrations, is_first=is_first)

    def _add_node(
        self,
        node: str,
        last_counts: dict[tuple[str, str], int],
        migrations: MigrationCounts,
        *,
        is_first: bool,
    ) -> None:
        totals = self._totals.setdefault(node, {})
        for key, count in migrations.items():
            # A counter that is missing in the first report of an Envoy was zero.
            before = last_counts.get(key, count if is_first else 0)
            increase = count - before if count >= before else count
            last_counts[key] = count
            if increase:
                totals[key] = totals.get(key, 0) + increase

    def forget_envoy(self, envoy: str) -> None:
        """Forget the baseline of an Envoy, but keep its attempts in the sums."""
        self._envoy_counters.pop(envoy, None)

    def retain_nodes(self, nodes: Mapping[str, object]) -> None:
        """Forget all nodes that are not in `nodes`.

        The Envoys keep the nodes' counters. So if a node returns, its first counts are a new baseline.
        """
        for node in self._totals.keys() - nodes.keys():
            del self._totals[node]
        for counters in self._envoy_counters.values():
            for node in counters.counts_by_node.keys() - nodes.keys():
                del counters.counts_by_node[node]
                counters.forgotten_nodes.add(node)
