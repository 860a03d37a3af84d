"""When each Envoy acknowledged, per node, that the node is closed to new sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from controlplane.model.envoys import EnvoyStatus


class DrainAcks:
    """Times of acknowledgement by Envoy and node address.

    One time per Envoy (since when it has acknowledged the latest version) would not do: every change of a
    weight is published too, and would delay the end of every drain.
    """

    def __init__(self) -> None:
        self._connected_since: dict[str, float] = {}
        self._acked_at: dict[str, dict[str, float]] = {}
        self.acked_at: Mapping[str, Mapping[str, float]] = MappingProxyType(self._acked_at)

    def retain(self, closed: Collection[str]) -> None:
        """Forget nodes that are open again; every Envoy has to acknowledge when they are closed again."""
        for times in self._acked_at.values():
            for address in [address for address in times if address not in closed]:
                del times[address]

    def update(self, status: EnvoyStatus, closed: Collection[str], now: float) -> None:
        """Record that an Envoy in this status has acknowledged that the nodes in `closed` are closed."""
        since = status.connected_since
        if since is None or status.streams != 1 or self._connected_since.get(status.id) != since:
            self.remove(status.id)  # it may have received something else meanwhile, or be another process
        if since is None or status.streams != 1:
            return
        self._connected_since[status.id] = since
        times = self._acked_at.setdefault(status.id, {})
        for address in closed:
            times.setdefault(address, now)

    def remove(self, envoy: str) -> None:
        """Forget all acknowledgements of an Envoy."""
        self._connected_since.pop(envoy, None)
        self._acked_at.pop(envoy, None)
