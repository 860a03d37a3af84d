"""Refreshes the metrics of all nodes from the source that the settings select.

The source is `/metrics` of each node, or a Prometheus server that scrapes the nodes. If the source fails, the
last metrics stay: each value has a time, which shows its age.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from controlplane.aio import KeyedTasks
from controlplane.clock import Clock
from controlplane.config.own_tls import ClientTls
from controlplane.config.settings import Settings
from controlplane.model.node_metrics import CounterSample, NodeMetrics
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget, next_probe_at
from controlplane.observe.node_metrics import rates
from controlplane.observe.node_metrics.http_fetcher import FetchError
from controlplane.observe.node_metrics.prometheus_source import PrometheusReader
from controlplane.observe.node_metrics.scraper import NodeScraper

MAX_SCRAPED_NODES = 200
"""Limit for scraping nodes directly: more nodes would cost this process too much CPU time."""

_OUTAGE_AFTER_FAILURES = 3  # consecutive failures of every node, or of Prometheus
_PROMETHEUS = "Prometheus"  # key of the Prometheus reader; the key of a node is its address

# Delay between the first scrapes of nodes that are added together, since responses are large.
_START_SPACING_SECONDS = 0.01


class NodeMetricsObserver:
    """Reads node metrics. Calls `publish` with all metrics by node address, and the outage (empty: none).

    Without Prometheus, each node has its own task, so that a silent node does not delay others.
    """

    def __init__(
        self,
        settings: Settings,
        publish: Callable[[Mapping[str, NodeMetrics], str], None],
        clock: Clock,
        status_tls: ReloadingClientContext | None = None,
        prometheus_tls: ReloadingClientContext | None = None,
    ) -> None:
        """`status_tls` is for the status ports of the nodes; None: they do not use TLS."""
        self._balance = settings.balance
        self._publish = publish
        self._clock = clock
        self._tls, self._prometheus_tls = status_tls, prometheus_tls
        self._prometheus: PrometheusReader | None = None
        self._targets: Mapping[str, CheckTarget] = {}
        self._metrics: dict[str, NodeMetrics] = {}
        self._samples: dict[str, Sequence[CounterSample]] = {}
        self._tasks = KeyedTasks[str]("metrics of")  # keys: node addresses, or `_PROMETHEUS`
        self._consecutive_failures: dict[str, int] = {}  # same keys

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes; the metrics of removed and changed nodes are forgotten."""
        for address in [a for a, target in self._targets.items() if targets.get(a) != target]:
            self._forget(address)
        self._targets = targets
        self._update_readers()

    def configure(self, settings: Settings) -> None:
        """Apply new settings; changes of TLS settings need a restart."""
        if settings.balance != self._balance:
            self._balance = settings.balance
            for reader in self._tasks.running_keys():
                self._stop(reader)
            self._update_readers()

    async def run(self) -> None:
        """Read until cancelled."""
        await self._tasks.run(self._update_readers)

    def _update_readers(self) -> None:
        """Start and stop tasks so that they match the settings and the nodes."""
        if not self._tasks.is_running:
            return
        scraped = {
            address: (target, target.status_endpoint)
            for address, target in self._targets.items()
            if target.status_endpoint is not None
        }
        uses_prometheus = self._balance.prometheus.url is not None
        disabled_reason = None if self._balance.needs_node_metrics else ""
        if disabled_reason is None and not uses_prometheus and len(scraped) > MAX_SCRAPED_NODES:
            disabled_reason = (
                f"node metrics are disabled: {len(scraped)} nodes exceed the limit of {MAX_SCRAPED_NODES} for"
                " direct scraping; set balance.prometheus.url to read the metrics from Prometheus"
            )
        if disabled_reason is not None:
            for address in (*self._targets, _PROMETHEUS):
                self._forget(address)
            self._publish(self._metrics, disabled_reason)
        elif uses_prometheus:
            if _PROMETHEUS not in self._tasks.running_keys():
                self._prometheus = self._create_prometheus_reader()
                self._tasks.start(_PROMETHEUS, self._read_periodically, _PROMETHEUS, self._prometheus, 0.0)
            if self._prometheus is not None:
                self._prometheus.set_targets(self._targets)
        else:
            for position, address in enumerate(sorted(scraped.keys() - self._tasks.running_keys())):
                scraper = NodeScraper(*scraped[address], self._tls)
                delay = position * _START_SPACING_SECONDS
                self._tasks.start(address, self._read_periodically, address, scraper, delay)

    def _create_prometheus_reader(self) -> PrometheusReader:
        settings, tls = self._balance.prometheus, None
        if (settings.url or "").startswith("https:"):
            tls = self._prometheus_tls or ReloadingClientContext(  # system CAs: no files to watch
                ClientTls(), ("balance", "prometheus"), self._clock, lambda *_: None
            )
        return PrometheusReader(settings, tls)

    async def _read_periodically(
        self, key: str, reader: NodeScraper | PrometheusReader, delay: float
    ) -> None:
        settings = self._balance.metrics
        await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        # The second read comes early by a random time, which spreads the nodes over the interval.
        due_at = loop.time() - random.uniform(0, settings.interval)
        try:
            while True:
                try:
                    self._store(key, await reader.read(self._clock, settings.timeout), "")
                except FetchError as error:
                    self._store(key, {}, str(error))
                due_at = next_probe_at(due_at, settings.interval, loop.time())
                await asyncio.sleep(due_at - loop.time())
        finally:
            await reader.close()

    def _store(self, key: str, samples: Mapping[str, CounterSample], problem: str) -> None:
        """Store the samples that a reader has read; `problem`: why the reader failed, or empty."""
        self._consecutive_failures[key] = self._consecutive_failures.get(key, 0) + 1 if problem else 0
        for address, sample in samples.items():
            self._samples[address] = rates.append_sample(self._samples.get(address, ()), sample)
            self._metrics[address] = rates.compute_node_metrics(self._samples[address])
        outage = ""
        if min(self._consecutive_failures.values()) >= _OUTAGE_AFTER_FAILURES:
            outage = f"node metrics are unavailable; last error: {problem}"
        self._publish(self._metrics, outage)

    def _forget(self, address: str) -> None:
        self._stop(address)
        self._metrics.pop(address, None)
        self._samples.pop(address, None)

    def _stop(self, key: str) -> None:
        self._consecutive_failures.pop(key, None)
        self._tasks.cancel(key)
