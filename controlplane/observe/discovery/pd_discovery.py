"""Discovery: follows the registrations of TiDB servers in PD's etcd, and says when it cannot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing

from controlplane.config.settings import Pd
from controlplane.errors import Compacted, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import Topology
from controlplane.observe.discovery.pd_registrations import (
    KEYSPACES_PREFIX,
    NO_KEYSPACE,
    TIDB_PREFIX,
    Registry,
)

STEADY_SECONDS = 5.0  # that the watches must have stood for a loss of them to count as the first in a row
LONGEST_PAUSE = 2.0

_PREFIXES = (TIDB_PREFIX, KEYSPACES_PREFIX)


class PdObserver:
    """Publishes a Topology for each change of it, in the moment the change arrives.

    While PD is away the nodes stay as they were last known and `outage` says why; a lost stream that another
    member carries on at once is no outage. Nothing of what is found in PD ends it.
    """

    def __init__(self, settings: Pd, publish: Callable[[Topology], None]) -> None:
        """`settings.urls` has at least one. ConfigError when a file of `settings.tls` cannot be read."""
        self._client = EtcdClient(settings.urls, tls=settings.tls)
        self._publish = publish
        self._registry = Registry(settings.keyspace or NO_KEYSPACE)
        self._seen: dict[str, int] = {}  # prefix -> revision up to which it is known; empty: list it all
        self._standing: set[str] = set()  # prefixes whose watch stands
        self._steady_from = float("inf")  # loop time
        self._complete = False
        self._outage = ""

    async def run(self) -> None:
        """Observe until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.keep_learning())
            tasks.create_task(self._observe())

    async def _observe(self) -> None:
        failures = 0
        while True:
            try:
                if not self._seen:
                    await self._list()
                await self._watch()
            except PdError as error:
                if asyncio.get_running_loop().time() >= self._steady_from:
                    failures = 0
                self._steady_from = float("inf")
                failures += 1
                if isinstance(error, Compacted):
                    self._seen.clear()
                elif failures > 1 or not self._complete:
                    self._tell(str(error))
            await asyncio.sleep(_pause(failures))

    async def _list(self) -> None:
        servers = await self._client.range(TIDB_PREFIX)
        keyspaces = await self._client.range(KEYSPACES_PREFIX, revision=servers.revision)
        entries = {**servers.entries, **keyspaces.entries}
        changed = self._registry.replace({key: entry.value for key, entry in entries.items()})
        self._seen = dict.fromkeys(_PREFIXES, servers.revision)
        if changed or self._outage or not self._complete:
            self._complete = True
            self._outage = ""
            self._show()

    async def _watch(self) -> None:
        """Follow all prefixes until one of the watches is lost; raises why."""
        self._standing.clear()
        lost: list[PdError] = []
        try:
            async with asyncio.TaskGroup() as watches:
                for prefix in _PREFIXES:
                    watches.create_task(self._follow(prefix))
        except* PdError as group:
            lost.extend(error for error in group.exceptions if isinstance(error, PdError))
        raise next((error for error in lost if isinstance(error, Compacted)), lost[0])

    async def _follow(self, prefix: str) -> None:
        async with aclosing(self._client.watch(prefix, self._seen[prefix] + 1)) as batches:
            async for batch in batches:
                if prefix not in self._standing:
                    self._stands(prefix)
                self._seen[prefix] = batch.revision
                if self._registry.apply(batch.changes):
                    self._show()

    def _stands(self, prefix: str) -> None:
        self._standing.add(prefix)
        if len(self._standing) == len(_PREFIXES):
            self._steady_from = asyncio.get_running_loop().time() + STEADY_SECONDS
            self._tell("")

    def _tell(self, outage: str) -> None:
        if outage != self._outage:
            self._outage = outage
            self._show()

    def _show(self) -> None:
        self._publish(self._registry.topology(complete=self._complete, outage=self._outage))


def _pause(failures: int) -> float:
    """Seconds before the next attempt: none after the first failure, when another member may take over."""
    if failures < 2:
        return 0.0
    return min(LONGEST_PAUSE, 0.1 * 2.0 ** min(failures - 2, 16)) * random.uniform(0.5, 1.0)
