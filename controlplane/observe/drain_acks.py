"""Since when each Envoy has known of each node that it is to open no new sessions there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from controlplane.model.envoys import EnvoyStatus


class DrainAcks:
    """Times by Envoy and address.

    Not one time an Envoy, of when it began to follow what is published: each change of a weight is published,
    and would put off the end of every drain.
    """

    def __init__(self) -> None:
        self._connected_since: dict[str, float] = {}
        self._acked_at: dict[str, dict[str, float]] = {}
        self.acked_at: Mapping[str, Mapping[str, float]] = MappingProxyType(self._acked_at)

    def retain(self, closed: Collection[str]) -> None:
        """Forget nodes that are not closed any more: who closes them again has to tell everybody anew."""
        for times in self._acked_at.values():
            for address in [each for each in times if each not in closed]:
                del times[address]

    def update(self, status: EnvoyStatus, closed: Collection[str], now: float) -> None:
        """An Envoy as it is now. It knows that these nodes are `closed`."""
        since = status.connected_since
        if since is None or status.streams != 1 or self._connected_since.get(status.id) != since:
            self.remove(status.id)  # it may have been told otherwise meanwhile, or be another one
        if since is None or status.streams != 1:
            return
        self._connected_since[status.id] = since
        times = self._acked_at.setdefault(status.id, {})
        for address in closed:
            times.setdefault(address, now)

    def remove(self, envoy: str) -> None:
        """Nothing is known of that Envoy any more."""
        self._connected_since.pop(envoy, None)
        self._acked_at.pop(envoy, None)
