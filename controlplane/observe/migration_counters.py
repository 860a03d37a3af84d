"""Tries to move sessions, counted over the restarts of the Envoys that tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from controlplane.model.traffic import ModuleReport, Moves


class _Told:
    """What an Envoy has said last, by node."""

    def __init__(self) -> None:
        self.instance = ""
        self.nodes: dict[str, dict[tuple[str, str], int]] = {}
        self.forgotten: set[str] = set()  # nodes of which more may have been counted than is known


class MoveCounts:
    """Sums by node that never fall: an Envoy counts from its start, and begins anew with each.

    They hold what was counted since this control plane heard of that Envoy's process first. How much that is
    by then says nothing of what came of it lately, so what the first flush of its first stream has is where
    counting begins.
    """

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}  # by Envoy
        self._sums: dict[str, dict[tuple[str, str], int]] = {}
        self.sums: Mapping[str, Moves] = MappingProxyType(self._sums)

    def add(self, report: ModuleReport) -> None:
        """Take over what an Envoy's module has counted by now."""
        told = self._told.get(report.envoy)
        if told is None or (report.is_first and report.instance != told.instance):
            told = self._told[report.envoy] = _Told()
        told.instance = report.instance
        for node, moves in report.moves().items():
            is_first = report.is_first or node in told.forgotten
            told.forgotten.discard(node)
            self._add(node, told.nodes.setdefault(node, {}), moves, is_first=is_first)

    def _add(self, node: str, told: dict[tuple[str, str], int], moves: Moves, *, is_first: bool) -> None:
        sums = self._sums.setdefault(node, {})
        for key, count in moves.items():
            # What was not in the first flush was zero then.
            before = told.get(key, count if is_first else 0)
            grown = count - before if count >= before else count
            told[key] = count
            if grown:
                sums[key] = sums.get(key, 0) + grown

    def forget(self, envoy: str) -> None:
        """That Envoy is not heard of any more. What it has counted stays in the sums."""
        self._told.pop(envoy, None)

    def keep(self, known: Mapping[str, object]) -> None:
        """Forget the nodes that are not known any more.

        Envoys count on where they were when such a node comes back, so its first flush is where counting
        begins again.
        """
        for node in self._sums.keys() - known.keys():
            del self._sums[node]
        for told in self._told.values():
            for node in told.nodes.keys() - known.keys():
                del told.nodes[node]
                told.forgotten.add(node)
