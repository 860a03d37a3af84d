"""What a simulation asks of those who share sessions out."""

from __future__ import annotations

from typing import Protocol


class Balancer(Protocol):
    """One way to balance. Nodes and Envoys are told of by their positions in the world."""

    def pick_node(self, envoy: int) -> int:
        """The node that a new session of that Envoy goes to; it is there at once."""

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """That Envoy has one session more (1) or less (-1) on that node."""

    def on_node_joined(self, node: int) -> None:
        """A node has come, and serves."""

    def on_node_drained(self, node: int) -> None:
        """A node is drained: it serves no new sessions any more."""

    def on_second_passed(self) -> None:
        """Another second has passed."""
