"""Sessions of a simulated fleet: they open on nodes by weight, end at random, and migrate on request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from bench.control_plane.xds_relay import endpoints_by_address
from sandbox.live_config import parse_live_config

_SEED = 20_260


def instance_id(envoy: int) -> str:
    """Return the id of an Envoy's process, as its module reports it."""
    return f"{envoy + 1:016x}"


class SessionSimulator:
    """A constant number of sessions. Envoys and nodes are numbered.

    Per Envoy and node, `live` counts the open sessions, and `opened` all sessions opened since the start.
    """

    def __init__(self, envoys: int, nodes: Sequence[str], sessions: int, arrivals_per_second: float) -> None:
        """`nodes`: addresses of the form IP:port; `arrivals_per_second`: new sessions of the whole fleet."""
        self._random = random.Random(_SEED)
        self._node_numbers = {address: number for number, address in enumerate(nodes)}
        self._arrivals_per_second = arrivals_per_second
        self._cumulative_weights = list(range(1, len(nodes) + 1))
        self._sessions: list[tuple[int, int]] = []
        self._pending_arrivals = 0.0
        self.live: list[Counter[int]] = [Counter() for _ in range(envoys)]
        self.opened: list[Counter[int]] = [Counter() for _ in range(envoys)]
        for number in range(sessions):
            self._open(self._random.randrange(envoys), number % len(nodes))

    def advance(self, seconds: float) -> None:
        """Simulate `seconds`: end sessions at random, and open the same number by the nodes' weights."""
        self._pending_arrivals += seconds * self._arrivals_per_second
        count, self._pending_arrivals = int(self._pending_arrivals), self._pending_arrivals % 1
        nodes = self._random.choices(
            range(len(self._cumulative_weights)), cum_weights=self._cumulative_weights, k=count
        )
        for node in nodes:
            self._end(self._random.randrange(len(self._sessions)))
            self._open(self._random.randrange(len(self.live)), node)

    def apply_endpoints(self, response: Any) -> None:
        """Open new sessions by the weights of these endpoints from now on."""
        weights = [0] * len(self._cumulative_weights)
        for address, endpoint in endpoints_by_address(response).items():
            weights[self._node_numbers[address]] = endpoint.load_balancing_weight.value
        self._cumulative_weights = list(accumulate(weights))

    def apply_live_config(self, response: Any) -> None:
        """Perform the migrations that this live configuration requests."""
        (body,) = response.resources
        outgoing: dict[str, list[int]] = {}
        incoming: dict[str, list[int]] = {}
        for node_config in parse_live_config(body.value)["nodes"]:
            for key, nodes in (("moves", outgoing), ("wants", incoming)):
                if key in node_config:
                    _parse_move_counts(node_config[key], self._node_numbers[node_config["address"]], nodes)
        for envoy in range(len(self.live)):
            name = instance_id(envoy)
            for source, target in zip(outgoing.get(name, ()), incoming.get(name, ()), strict=False):
                self._move(envoy, source, target)

    def _open(self, envoy: int, node: int) -> None:
        self._sessions.append((envoy, node))
        self.live[envoy][node] += 1
        self.opened[envoy][node] += 1

    def _end(self, index: int) -> None:
        envoy, node = self._sessions[index]
        self._sessions[index] = self._sessions[-1]
        self._sessions.pop()
        self.live[envoy][node] -= 1

    def _move(self, envoy: int, source: int, target: int) -> None:
        if self.live[envoy][source]:
            self._sessions[self._sessions.index((envoy, source))] = (envoy, target)
            self.live[envoy][source] -= 1
            self.live[envoy][target] += 1


def _parse_move_counts(text: str, node: int, nodes: dict[str, list[int]]) -> None:
    """Parse `ROUND:INSTANCE=COUNT,...` and append `node` to the list of each instance, COUNT times.

    ROUND is ignored, so a configuration that is received twice migrates its sessions twice.
    """
    for part in text.partition(":")[2].split(","):
        instance, _, count = part.partition("=")
        nodes.setdefault(instance, []).extend([node] * int(count))
