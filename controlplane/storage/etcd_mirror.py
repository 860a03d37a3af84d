"""A local copy of all keys under a prefix in PD, kept current by a watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType

from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.prefix_watcher import PrefixUpdate, watch_prefix
from controlplane.etcd.types import Entry, RangeResult, WatchBatch


class EtcdMirror:
    """The last known keys, also while PD is unreachable. `is_current`: the watch receives changes."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        *,
        on_change: Callable[[], None],
        on_outage: Callable[[str], None],
    ) -> None:
        """`on_change` reports new keys or a new `is_current`; `on_outage` gets the problem, "" at its end."""
        self._client = client
        self._prefix = prefix
        self._on_change, self._on_outage = on_change, on_outage
        self._entries: dict[str, Entry] = {}
        self._listed_revision: int | None = None  # of the last listing; None: not listed yet
        self._has_outage = False
        self.is_current = False

    @property
    def entries(self) -> Mapping[str, Entry]:
        """A consistent copy of the current keys."""
        return MappingProxyType(dict(self._entries))

    async def load(self) -> None:
        """List all keys. Raises PdError."""
        self._apply(await self._client.range(self._prefix))

    async def run(self) -> None:
        """Keep the keys current until cancelled."""
        async with aclosing(watch_prefix(self._client, self._prefix, self._listed_revision)) as updates:
            async for update in updates:
                self._apply(update)

    def _apply(self, update: PrefixUpdate) -> None:
        was_current = self.is_current
        match update:
            case PdError():
                self.is_current = False
                has_changed = was_current
                self._set_outage(str(update))
            case RangeResult():
                self._entries, self._listed_revision = dict(update.entries), update.revision
                has_changed = True
            case WatchBatch():
                for change in update.changes:
                    if change.value is None:
                        self._entries.pop(change.key, None)
                    else:
                        self._entries[change.key] = Entry(change.value, change.mod_revision)
                self.is_current = True
                has_changed = bool(update.changes) or not was_current
                self._set_outage("")
        if has_changed:
            self._on_change()

    def _set_outage(self, outage: str) -> None:
        if bool(outage) != self._has_outage:
            self._has_outage = bool(outage)
            self._on_outage(outage)
