"""Reads the counters of one node from `GET /metrics` on its status port."""

from __future__ import annotations

import asyncio

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.model.node_metrics import CounterSample
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics.exposition_parser import parse_exposition
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher


class NodeScraper:
    """Scrapes one node over a connection that stays open."""

    def __init__(self, target: CheckTarget, endpoint: str, tls: ReloadingClientContext | None) -> None:
        """`endpoint`: the `ip:port` of the node's status port."""
        self._address = target.address
        self._url = f"{'https' if tls else 'http'}://{endpoint}/metrics"
        self._fetcher = HttpFetcher(tls, addresses.join(target.status_host, addresses.split(endpoint)[1]))

    async def read(self, clock: Clock, timeout: float) -> dict[str, CounterSample]:
        """Return a sample, by the address of the node. Raises FetchError."""
        body = await self._fetcher.get(self._url, timeout, headers={"Accept": "text/plain;version=0.0.4"})
        # In a thread, since a hostile node may send megabytes of short lines, which take seconds to parse.
        sample = await asyncio.to_thread(parse_exposition, body, clock())
        if sample is None:
            raise FetchError(f"{self._url} has none of TiDB's metrics")
        return {self._address: sample}

    async def close(self) -> None:
        await self._fetcher.close()
