"""Reads `GET /metrics` of the nodes' status ports, a task for each: a silent one delays no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.model.node_metrics import Sample
from controlplane.observe.health.client_tls import ClientContext
from controlplane.observe.health.health_checker import Target, next_start
from controlplane.observe.node_metrics.exposition_parser import MetricsText
from controlplane.observe.node_metrics.http_fetcher import NoPage, Pages

# Seconds between the first readings of nodes that come at once: their answers are long.
_PACE = 0.01


class MetricsScraper:
    """Reads nodes again and again; `take` hears of each sample, or (None) that there was none and why."""

    def __init__(
        self,
        take: Callable[[str, Sample | None, str], None],
        clock: Clock,
        tls: ClientContext | None,
        *,
        interval: float,
        timeout: float,
    ) -> None:
        self._take = take
        self._clock = clock
        self._tls = tls
        self._interval, self._timeout = interval, timeout
        self._targets: Mapping[str, Target] = {}
        self._tasks: dict[str, tuple[Target, asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    def watch(self, targets: Mapping[str, Target]) -> None:
        """The whole set of nodes, in place of the former one; those without a status port are left out."""
        self._targets = {address: target for address, target in targets.items() if target.status is not None}
        for address, (target, task) in list(self._tasks.items()):
            if self._targets.get(address) != target:
                del self._tasks[address]
                task.cancel()
        if self._group is None:
            return
        fresh = self._targets.keys() - self._tasks.keys()
        for position, address in enumerate(sorted(fresh)):
            target = self._targets[address]
            task = self._group.create_task(
                self._repeat(target, position * _PACE), name=f"metrics of {address}"
            )
            self._tasks[address] = target, task

    async def run(self) -> None:
        """Read until cancelled; then every connection is closed."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self.watch(self._targets)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None
                self._tasks.clear()

    async def _repeat(self, target: Target, delay: float) -> None:
        await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        pages = Pages(self._tls, _authority(target))
        try:
            # As the checks do: the second comes early by a random part of the interval, to spread the nodes.
            start = loop.time() - random.uniform(0, self._interval)
            while True:
                await self._read(target, pages)
                start = next_start(start, self._interval, loop.time())
                await asyncio.sleep(start - loop.time())
        finally:
            await pages.close()

    async def _read(self, target: Target, pages: Pages) -> None:
        text = MetricsText()
        url = f"{'https' if self._tls else 'http'}://{target.status}/metrics"
        try:
            await pages.get(url, text.feed, self._timeout, headers={"Accept": "text/plain;version=0.0.4"})
        except NoPage as problem:
            self._take(target.address, None, str(problem))
            return
        sample = text.sample(self._clock())
        self._take(target.address, sample, "" if sample else f"{url} has none of TiDB's series")


def _authority(target: Target) -> str:
    """What goes into `Host`: the status port by its name."""
    return addresses.join(target.status_host, addresses.split(target.status or "")[1])
