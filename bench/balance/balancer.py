"""The interface of a simulated balancer."""

from __future__ import annotations

from typing import Protocol


class Balancer(Protocol):
    """A balancing algorithm. Nodes and Envoys are numbered by their positions in the cluster."""

    def pick_node(self, envoy: int) -> int:
        """Return the node for a new session of the Envoy; the session starts there at once."""

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """The Envoy has one session more (`delta` 1) or fewer (-1) on the node."""

    def on_node_joined(self, node: int) -> None:
        """A node has joined and serves."""

    def on_node_drained(self, node: int) -> None:
        """A node is drained: it accepts no new sessions."""

    def on_second_passed(self) -> None:
        """One second has passed."""
