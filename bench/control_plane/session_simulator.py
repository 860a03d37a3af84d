"""The sessions of a simulated fleet: they open where weights say, end by chance, and move when asked to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from controlplane import address as addresses
from sandbox import live_config

_SEED = 20_260
_INSTANCE = "{:016x}"


def instance(envoy: int) -> str:
    """The name of an Envoy's process, as its module tells it."""
    return _INSTANCE.format(envoy + 1)


class Population:
    """Sessions by Envoy and node, both by number. There are as many all the time, on average.

    Of each Envoy: `live` sessions now, and `opened` ones since the simulation began.
    """

    def __init__(self, envoys: int, nodes: Sequence[str], sessions: int, arrivals: float) -> None:
        """`nodes` by address, which are IP addresses; `arrivals`: of the whole fleet, a second."""
        self._random = random.Random(_SEED)
        self._numbers = {address: number for number, address in enumerate(nodes)}
        self._arrivals = arrivals
        self._cumulated = list(range(1, len(nodes) + 1))
        self._everyone: list[tuple[int, int]] = []
        self._due = 0.0
        self.live: list[Counter[int]] = [Counter() for _ in range(envoys)]
        self.opened: list[Counter[int]] = [Counter() for _ in range(envoys)]
        for number in range(sessions):
            self._open(self._random.randrange(envoys), number % len(nodes))

    def pass_time(self, seconds: float) -> None:
        """As many sessions open as end."""
        self._due += seconds * self._arrivals
        count, self._due = int(self._due), self._due % 1
        nodes = self._random.choices(range(len(self._cumulated)), cum_weights=self._cumulated, k=count)
        for node in nodes:
            self._end(self._random.randrange(len(self._everyone)))
            self._open(self._random.randrange(len(self.live)), node)

    def take_endpoints(self, response: bytes) -> None:
        """Go by the weights of these endpoints from now on."""
        (body,) = discovery_pb2.DiscoveryResponse.FromString(response).resources
        assignment = endpoint_pb2.ClusterLoadAssignment.FromString(body.value)
        weights = [0] * len(self._cumulated)
        for locality in assignment.endpoints:
            for each in locality.lb_endpoints:
                at = each.endpoint.address.socket_address
                weights[self._numbers[addresses.join(at.address, at.port_value)]] = (
                    each.load_balancing_weight.value
                )
        self._cumulated = list(accumulate(weights))

    def take_live_config(self, response: bytes) -> None:
        """Move the sessions that this live configuration asks for."""
        (body,) = discovery_pb2.DiscoveryResponse.FromString(response).resources
        leave: dict[str, list[int]] = {}
        come: dict[str, list[int]] = {}
        for told in live_config.read(body.value)["nodes"]:
            for key, nodes in (("moves", leave), ("wants", come)):
                if key in told:
                    _read(told[key], self._numbers[told["address"]], nodes)
        for envoy in range(len(self.live)):
            name = instance(envoy)
            for source, target in zip(leave.get(name, ()), come.get(name, ()), strict=False):
                self._move(envoy, source, target)

    def _open(self, envoy: int, node: int) -> None:
        self._everyone.append((envoy, node))
        self.live[envoy][node] += 1
        self.opened[envoy][node] += 1

    def _end(self, index: int) -> None:
        envoy, node = self._everyone[index]
        self._everyone[index] = self._everyone[-1]
        self._everyone.pop()
        self.live[envoy][node] -= 1

    def _move(self, envoy: int, source: int, target: int) -> None:
        if self.live[envoy][source]:
            self._everyone[self._everyone.index((envoy, source))] = (envoy, target)
            self.live[envoy][source] -= 1
            self.live[envoy][target] += 1


def _read(asked: str, node: int, nodes: dict[str, list[int]]) -> None:
    """Take in `ROUND:INSTANCE=COUNT,...`. A round that is told again finds nobody left whom it could ask."""
    for each in asked.partition(":")[2].split(","):
        name, _, count = each.partition("=")
        nodes.setdefault(name, []).extend([node] * int(count))
