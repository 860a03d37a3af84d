"""The loop that joins observers, decisions and the publisher; the only place that knows all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from controlplane.clock import Clock, steady_clock
from controlplane.config import Settings
from controlplane.model import EnvoyView, Event, NodeView, OnDeadline, Problem, Reloaded


class Engine:
    """A running control plane. All methods belong to the event loop that `run` runs in."""

    def __init__(
        self,
        settings: Settings,
        *,
        load_settings: Callable[[], Settings] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._load_settings = load_settings
        self._clock = clock or steady_clock()

    async def run(self) -> None:
        """Observe, decide and publish until cancelled."""
        raise NotImplementedError

    async def started(self) -> None:
        """Returns when state is read back and the xDS port is open."""
        raise NotImplementedError

    # --- reading ---

    def nodes(self) -> list[NodeView]:
        """All nodes, by address."""
        raise NotImplementedError

    def node(self, address: str) -> NodeView:
        """One node. UnknownNode."""
        raise NotImplementedError

    def problems(self) -> list[Problem]:
        """Entries of sources that could not be used."""
        raise NotImplementedError

    def foreign(self) -> Mapping[str, str]:
        """Nodes of other keyspaces: address -> keyspace. Never routed to."""
        raise NotImplementedError

    def envoys(self) -> list[EnvoyView]:
        """The fleet, by id."""
        raise NotImplementedError

    def unready(self) -> list[str]:
        """Why this control plane is not ready, one sentence each; empty when it is."""
        raise NotImplementedError

    def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events as they happen; first those kept that are newer than the id `after`, when it is given."""
        raise NotImplementedError

    # --- operators' intents; each returns when the intent is on disk ---

    async def add(
        self,
        address: str,
        *,
        status_address: str | None = None,
        weight: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> NodeView:
        """Add a node by hand. NodeExists."""
        raise NotImplementedError

    async def remove(self, address: str, *, force: bool = False) -> NodeView:
        """Drain a node and then forget it. UnknownNode; NeedsModule with `force`."""
        raise NotImplementedError

    async def drain(
        self, address: str, *, deadline_seconds: float = 600.0, on_deadline: OnDeadline = OnDeadline.KEEP
    ) -> NodeView:
        """Stop new sessions on a node. Idempotent. UnknownNode; NeedsModule with `close`."""
        raise NotImplementedError

    async def undrain(self, address: str) -> NodeView:
        """Take a drain back. Idempotent. UnknownNode."""
        raise NotImplementedError

    async def amend(
        self, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
    ) -> NodeView:
        """Change a node's capacity or labels. UnknownNode."""
        raise NotImplementedError

    async def reload(self) -> Reloaded:
        """Read the configuration again. ConfigError, and then the old one stays in force."""
        raise NotImplementedError
