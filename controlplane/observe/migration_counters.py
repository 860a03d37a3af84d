"""Tries to move sessions, counted over the restarts of the Envoys that tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from controlplane.model.traffic import MigrationCounts, ModuleReport


class _EnvoyCounters:
    """What an Envoy has said last, by node."""

    def __init__(self) -> None:
        self.instance = ""
        self.counts_by_node: dict[str, dict[tuple[str, str], int]] = {}
        self.forgotten_nodes: set[str] = set()  # nodes of which more may have been counted than is known


class MigrationCounters:
    """Sums by node that never fall: an Envoy counts from its start, and begins anew with each.

    They hold what was counted since this control plane heard of that Envoy's process first. How much that is
    by then says nothing of what came of it lately, so what the first flush of its first stream has is where
    counting begins.
    """

    def __init__(self) -> None:
        self._envoy_counters: dict[str, _EnvoyCounters] = {}  # by Envoy
        self._totals: dict[str, dict[tuple[str, str], int]] = {}
        self.totals: Mapping[str, MigrationCounts] = MappingProxyType(self._totals)

    def add(self, report: ModuleReport) -> None:
        """Take over what an Envoy's module has counted by now."""
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
            # What was not in the first flush was zero then.
            before = last_counts.get(key, count if is_first else 0)
            increase = count - before if count >= before else count
            last_counts[key] = count
            if increase:
                totals[key] = totals.get(key, 0) + increase

    def forget_envoy(self, envoy: str) -> None:
        """That Envoy is not heard of any more. What it has counted stays in the sums."""
        self._envoy_counters.pop(envoy, None)

    def retain_nodes(self, known: Mapping[str, object]) -> None:
        """Forget the nodes that are not known any more.

        Envoys count on where they were when such a node comes back, so its first flush is where counting
        begins again.
        """
        for node in self._totals.keys() - known.keys():
            del self._totals[node]
        for counters in self._envoy_counters.values():
            for node in counters.counts_by_node.keys() - known.keys():
                del counters.counts_by_node[node]
                counters.forgotten_nodes.add(node)
