"""Watches the registrations of TiDB servers in PD's etcd and reports outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

from controlplane.config.settings import PdSettings
from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.prefix_watcher import PrefixUpdate, watch_prefix
from controlplane.etcd.types import RangeResult, WatchBatch
from controlplane.model.nodes import Source, Topology
from controlplane.observe.discovery.pd_registrations import (
    KEYSPACES_PREFIX,
    NO_KEYSPACE,
    TIDB_PREFIX,
    PdRegistrations,
)

_PREFIXES = frozenset({TIDB_PREFIX, KEYSPACES_PREFIX})


class PdObserver:
    """Publishes a Topology after each change.

    While PD is unavailable, the last known nodes stay, and `Topology.outage` contains the reason. A lost
    watch that another PD member continues at once is no outage. Invalid data never stops the observer.
    """

    def __init__(self, settings: PdSettings, publish: Callable[[Topology], None]) -> None:
        """`settings.urls` must not be empty. Raises ConfigError if a file of `settings.tls` is unreadable."""
        self._client = EtcdClient(settings.urls, tls=settings.tls)
        self._publish = publish
        self._registrations = PdRegistrations(settings.keyspace or NO_KEYSPACE)
        self._prefixes_to_list = set(_PREFIXES)  # prefixes whose keys are not known yet
        self._failing: dict[str, str] = {}  # prefix -> why its changes do not arrive
        self._topology = Topology(Source.PD)  # the latest published topology
        self._is_changed = True  # the registrations may differ from those in `_topology`

    async def run(self) -> None:
        """Observe until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.keep_members_current())
            for prefix in _PREFIXES:
                tasks.create_task(self._follow(prefix))

    async def _follow(self, prefix: str) -> None:
        async with aclosing(watch_prefix(self._client, prefix)) as updates:
            async for update in updates:
                self._apply(prefix, update)

    def _apply(self, prefix: str, update: PrefixUpdate) -> None:
        match update:
            case RangeResult():
                values = {key: entry.value for key, entry in update.entries.items()}
                self._is_changed |= self._registrations.replace_prefix(values, prefix)
                self._prefixes_to_list.discard(prefix)
                self._failing.pop(prefix, None)
            case WatchBatch():
                self._is_changed |= self._registrations.apply(update.changes)
                self._failing.pop(prefix, None)
            case PdError():
                self._failing[prefix] = str(update)
        # Only one reason: when PD is down, both prefixes fail, each with a different text.
        outage = next(iter(self._failing.values()), "")
        if self._is_changed and not self._prefixes_to_list and not self._failing:
            self._is_changed = False
            self._topology = self._registrations.topology()
        elif outage != self._topology.outage:
            # The nodes stay: the keys of both prefixes are needed to recognize nodes of other keyspaces.
            self._topology = replace(self._topology, outage=outage)
        else:
            return
        self._publish(self._topology)
