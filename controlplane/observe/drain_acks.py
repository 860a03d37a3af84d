"""Records when each Envoy acknowledged that a node is closed to new sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from controlplane.model.envoys import EnvoyStatus


class DrainAcks:
    """Times of acknowledgement by Envoy id and node address.

    One time per Envoy is not enough: every change of a weight publishes a new version, and a drain would
    have to wait until the Envoy has acknowledged the latest version.
    """

    def __init__(self) -> None:
        self._connected_since: dict[str, float] = {}
        self._acknowledged_at: dict[str, dict[str, float]] = {}
        self.acknowledged_at: Mapping[str, Mapping[str, float]] = MappingProxyType(self._acknowledged_at)

    def retain(self, closed: Collection[str]) -> None:
        """Forget nodes that are not in `closed`: if they are closed again, Envoys must acknowledge again."""
        for times in self._acknowledged_at.values():
            for address in [address for address in times if address not in closed]:
                del times[address]

    def update(self, status: EnvoyStatus, closed: Collection[str], now: float) -> None:
        """Record that an Envoy has acknowledged that the nodes in `closed` are closed to new sessions."""
        since = status.connected_since
        if since is None or status.streams != 1 or self._connected_since.get(status.id) != since:
            self.remove(status.id)  # it may be another process, or have received other endpoints
        if since is None or status.streams != 1:
            return
        self._connected_since[status.id] = since
        times = self._acknowledged_at.setdefault(status.id, {})
        for address in closed:
            times.setdefault(address, now)

    def remove(self, envoy: str) -> None:
        """Forget all acknowledgements of an Envoy."""
        self._connected_since.pop(envoy, None)
        self._acknowledged_at.pop(envoy, None)
