"""Counts migration attempts by node, across restarts of the Envoys that report them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from controlplane.model.traffic import MigrationCounts, ModuleReport


class _EnvoyCounters:
    """The latest counters of one Envoy, by node."""

    def __init__(self) -> None:
        self.instance = ""
        self.counts_by_node: dict[str, dict[tuple[str, str], int]] = {}
        self.forgotten_nodes: set[str] = set()  # nodes whose Envoy-side counters may be above our last values


class MigrationCounters:
    """Sums by node that never decrease, although an Envoy's counters restart at zero with its process.

    The sums hold what was counted since this control plane received the first report of an Envoy's process.
    The values in that report say nothing about recent attempts, so they are the baseline.
    """

    def __init__(self) -> None:
        self._envoy_counters: dict[str, _EnvoyCounters] = {}  # by Envoy
        self._totals: dict[str, dict[tuple[str, str], int]] = {}
        self.totals: Mapping[str, MigrationCounts] = MappingProxyType(self._totals)

    def add(self, report: ModuleReport) -> None:
        """Add what an Envoy's module has counted since its previous report."""
        counters = self._envoy_counters.get(report.envoy)
        if counters is None or (report.is_first and report.instance != counters.instance):
            counters = self._envoy_counters[report.envoy] = _EnvoyCounters()
        counters.instance = report.instance
        for node, migrations in report.migrations().items():
            is_first = report.is_first or node in counters.forgotten_nodes
            counters.forgotten_nodes.discard(node)
            self._add(node, counters.counts_by_node.setdefault(node, {}), migrations, is_first=is_first)

    def _add(
        self,
        node: str,
        last_counts: dict[tuple[str, str], int],
        migrations: MigrationCounts,
        *,
        is_first: bool,
    ) -> None:
        totals = self._totals.setdefault(node, {})
        for key, count in migrations.items():
            # A counter that was missing in the first flush was zero then.
            before = last_counts.get(key, count if is_first else 0)
            increase = count - before if count >= before else count
            last_counts[key] = count
            if increase:
                totals[key] = totals.get(key, 0) + increase

    def forget_envoy(self, envoy: str) -> None:
        """Forget the baseline of an Envoy; what it has counted stays in the sums."""
        self._envoy_counters.pop(envoy, None)

    def retain_nodes(self, nodes: Mapping[str, object]) -> None:
        """Forget all nodes that are not in `nodes`.

        When such a node comes back, the Envoys' counters continue from their old values, so the first flush
        with it becomes the new baseline.
        """
        for node in self._totals.keys() - nodes.keys():
            del self._totals[node]
        for counters in self._envoy_counters.values():
            for node in counters.counts_by_node.keys() - nodes.keys():
                del counters.counts_by_node[node]
                counters.forgotten_nodes.add(node)
