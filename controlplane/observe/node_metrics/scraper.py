"""Scrapes `GET /metrics` of the nodes' status ports, in one task per node: a silent node delays no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.model.node_metrics import CounterSample
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget, next_probe_at
from controlplane.observe.node_metrics.exposition_parser import ExpositionParser
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher

# Delay between the first scrapes of nodes that are added together, since the responses are long.
_START_SPACING_SECONDS = 0.01


class MetricsScraper:
    """Scrapes nodes periodically; `on_sample` gets the node address, the sample or None, and the problem."""

    def __init__(
        self,
        on_sample: Callable[[str, CounterSample | None, str], None],
        clock: Clock,
        tls: ReloadingClientContext | None,
        *,
        interval: float,
        timeout: float,
    ) -> None:
        self._on_sample = on_sample
        self._clock = clock
        self._tls = tls
        self._interval, self._timeout = interval, timeout
        self._targets: Mapping[str, CheckTarget] = {}
        self._tasks: dict[str, tuple[CheckTarget, asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes; nodes without a status port are ignored."""
        self._targets = {
            address: target for address, target in targets.items() if target.status_endpoint is not None
        }
        for address, (target, task) in list(self._tasks.items()):
            if self._targets.get(address) != target:
                del self._tasks[address]
                task.cancel()
        if self._group is None:
            return
        new_addresses = self._targets.keys() - self._tasks.keys()
        for position, address in enumerate(sorted(new_addresses)):
            target = self._targets[address]
            task = self._group.create_task(
                self._scrape_loop(target, position * _START_SPACING_SECONDS), name=f"metrics of {address}"
            )
            self._tasks[address] = target, task

    async def run(self) -> None:
        """Scrape until cancelled, then close all connections."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self.set_targets(self._targets)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None
                self._tasks.clear()

    async def _scrape_loop(self, target: CheckTarget, delay: float) -> None:
        await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        fetcher = HttpFetcher(self._tls, _host_header(target))
        try:
            # As in the health checks: the second is early by a random part of the interval, to spread the
            # nodes.
            due_at = loop.time() - random.uniform(0, self._interval)
            while True:
                await self._scrape(target, fetcher)
                due_at = next_probe_at(due_at, self._interval, loop.time())
                await asyncio.sleep(due_at - loop.time())
        finally:
            await fetcher.close()

    async def _scrape(self, target: CheckTarget, fetcher: HttpFetcher) -> None:
        parser = ExpositionParser()
        url = f"{'https' if self._tls else 'http'}://{target.status_endpoint}/metrics"
        try:
            await fetcher.get(url, parser.feed, self._timeout, headers={"Accept": "text/plain;version=0.0.4"})
        except FetchError as error:
            self._on_sample(target.address, None, str(error))
            return
        sample = parser.sample(self._clock())
        self._on_sample(target.address, sample, "" if sample else f"{url} has none of TiDB's metrics")


def _host_header(target: CheckTarget) -> str:
    """Return the value of the `Host` header: the status address with the host name."""
    return addresses.join(target.status_host, addresses.split(target.status_endpoint or "")[1])
