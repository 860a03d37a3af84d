"""Watches the registrations of TiDB servers in PD's etcd and reports outages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing

from controlplane.config.settings import PdSettings
from controlplane.errors import Compacted, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import Topology
from controlplane.observe.discovery.pd_registrations import (
    KEYSPACES_PREFIX,
    NO_KEYSPACE,
    TIDB_PREFIX,
    PdRegistrations,
)

STABLE_WATCH_SECONDS = 5.0  # once the watches have run for this long, their loss counts as a first failure
MAX_RETRY_SECONDS = 2.0

_PREFIXES = (TIDB_PREFIX, KEYSPACES_PREFIX)


class PdObserver:
    """Publishes a Topology as soon as a change arrives.

    While PD is unavailable, the last known nodes stay and `outage` gives the reason; a lost stream that
    another member continues at once is not an outage. Invalid data in PD never stops the observer.
    """

    def __init__(self, settings: PdSettings, publish: Callable[[Topology], None]) -> None:
        """`settings.urls` must not be empty. Raises ConfigError if a file of `settings.tls` is unreadable."""
        self._client = EtcdClient(settings.urls, tls=settings.tls)
        self._publish = publish
        self._registrations = PdRegistrations(settings.keyspace or NO_KEYSPACE)
        self._revisions: dict[str, int] = {}  # prefix -> last revision that was read; empty: list everything
        self._ready_watches: set[str] = set()  # prefixes whose watch is established
        self._stable_at = float("inf")  # loop time
        self._is_complete = False
        self._outage = ""

    async def run(self) -> None:
        """Observe until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.keep_members_current())
            tasks.create_task(self._observe())

    async def _observe(self) -> None:
        failures = 0
        while True:
            try:
                if not self._revisions:
                    await self._list_all()
                await self._watch_all()
            except PdError as error:
                if asyncio.get_running_loop().time() >= self._stable_at:
                    failures = 0
                self._stable_at = float("inf")
                failures += 1
                if isinstance(error, Compacted):
                    self._revisions.clear()
                elif failures > 1 or not self._is_complete:
                    self._set_outage(str(error))
            await asyncio.sleep(_retry_delay(failures))

    async def _list_all(self) -> None:
        servers = await self._client.range(TIDB_PREFIX)
        keyspaces = await self._client.range(KEYSPACES_PREFIX, revision=servers.revision)
        entries = {**servers.entries, **keyspaces.entries}
        changed = self._registrations.replace({key: entry.value for key, entry in entries.items()})
        self._revisions = dict.fromkeys(_PREFIXES, servers.revision)
        if changed or self._outage or not self._is_complete:
            self._is_complete = True
            self._outage = ""
            self._publish_topology()

    async def _watch_all(self) -> None:
        """Watch all prefixes until a watch is lost. Raises PdError, as Compacted if a watch was compacted."""
        self._ready_watches.clear()
        errors: list[PdError] = []
        try:
            async with asyncio.TaskGroup() as watches:
                for prefix in _PREFIXES:
                    watches.create_task(self._watch_prefix(prefix))
        except* PdError as group:
            errors.extend(error for error in group.exceptions if isinstance(error, PdError))
        raise next((error for error in errors if isinstance(error, Compacted)), errors[0])

    async def _watch_prefix(self, prefix: str) -> None:
        async with aclosing(self._client.watch(prefix, self._revisions[prefix] + 1)) as batches:
            async for batch in batches:
                if prefix not in self._ready_watches:
                    self._on_watch_ready(prefix)
                self._revisions[prefix] = batch.revision
                if self._registrations.apply(batch.changes):
                    self._publish_topology()

    def _on_watch_ready(self, prefix: str) -> None:
        self._ready_watches.add(prefix)
        if len(self._ready_watches) == len(_PREFIXES):
            self._stable_at = asyncio.get_running_loop().time() + STABLE_WATCH_SECONDS
            self._set_outage("")

    def _set_outage(self, outage: str) -> None:
        if outage != self._outage:
            self._outage = outage
            self._publish_topology()

    def _publish_topology(self) -> None:
        self._publish(self._registrations.topology(is_complete=self._is_complete, outage=self._outage))


def _retry_delay(failures: int) -> float:
    """Return the seconds before the next attempt: 0 after the first failure: another member may respond."""
    if failures < 2:
        return 0.0
    return min(MAX_RETRY_SECONDS, 0.1 * 2.0 ** min(failures - 2, 16)) * random.uniform(0.5, 1.0)
