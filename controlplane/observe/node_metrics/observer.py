"""Refreshes the metrics of all nodes from the source that the settings select.

The source is the nodes' own `/metrics`, or a Prometheus server that scrapes them anyway. The last metrics of
a node stay when the source fails: each value has a time, so its users can tell how old it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from controlplane.clock import Clock
from controlplane.config.settings import ClientTls, Settings
from controlplane.model.node_metrics import CounterSample, NodeMetrics
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics import rates
from controlplane.observe.node_metrics.prometheus_source import PrometheusReader
from controlplane.observe.node_metrics.scraper import MetricsScraper

MAX_SCRAPED_NODES = 200
"""Most nodes that are scraped directly: more would use too much of this process's core."""

_OUTAGE_AFTER_FAILURES = 3  # consecutive failures of every node, or of Prometheus, that count as an outage


class NodeMetricsObserver:
    """Reads node metrics; `publish` gets all metrics by node address, and the outage (empty: none)."""

    def __init__(
        self, settings: Settings, publish: Callable[[Mapping[str, NodeMetrics], str], None], clock: Clock
    ) -> None:
        """Raises ConfigError if TLS files are unusable."""
        self._balance = settings.balance
        self._publish = publish
        self._clock = clock
        status, ca = settings.health.status, settings.balance.prometheus.ca
        self._tls = (
            ReloadingClientContext(status.client_tls, "health.status.client_tls") if status.tls else None
        )
        self._prometheus_tls = ReloadingClientContext(ClientTls(ca=ca), "balance.prometheus") if ca else None
        self._targets: Mapping[str, CheckTarget] = {}
        self._metrics: dict[str, NodeMetrics] = {}
        self._samples: dict[str, Sequence[CounterSample]] = {}
        self._consecutive_failures: dict[str, int] = {}  # by node address
        self._prometheus_failures = 0  # consecutive ones
        self._source: MetricsScraper | PrometheusReader | None = None
        self._source_changed = asyncio.Event()

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes; the metrics of removed and changed ones are forgotten."""
        for address in [a for a, target in self._targets.items() if targets.get(a) != target]:
            self._forget(address)
        self._targets = targets
        if (self._source is None) != (self._disabled_reason() is not None):
            self._source_changed.set()
        elif self._source is not None:
            self._source.set_targets(targets)

    def configure(self, settings: Settings) -> None:
        """Apply new settings; changes of TLS settings need a restart."""
        if settings.balance != self._balance:
            self._balance = settings.balance
            self._source_changed.set()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._source_changed.clear()
            async with asyncio.TaskGroup() as tasks:
                source_task = tasks.create_task(self._run_source())
                await self._source_changed.wait()
                source_task.cancel()

    async def _run_source(self) -> None:
        reason = self._disabled_reason()
        self._consecutive_failures.clear()
        if reason is not None:
            self._source = None
            for address in self._targets:
                self._forget(address)
            self._publish(self._metrics, reason)
            return
        self._source = self._create_source()
        self._source.set_targets(self._targets)
        await self._source.run()

    def _disabled_reason(self) -> str | None:
        """Return why no metrics are read ("": none are needed); None: they are read."""
        if not self._balance.needs_node_metrics:
            return ""
        if self._balance.prometheus.url is None:
            count = sum(target.status_endpoint is not None for target in self._targets.values())
            if count > MAX_SCRAPED_NODES:
                return (
                    f"node metrics are disabled: {count} nodes exceed the limit of {MAX_SCRAPED_NODES} for"
                    " direct scraping; set balance.prometheus.url to read the metrics from Prometheus"
                )
        return None

    def _create_source(self) -> MetricsScraper | PrometheusReader:
        metrics, prometheus = self._balance.metrics, self._balance.prometheus
        timing = {"interval": metrics.interval, "timeout": metrics.timeout}
        if prometheus.url is None:
            return MetricsScraper(self._on_sample, self._clock, self._tls, **timing)
        tls = None
        if prometheus.url.startswith("https:"):
            tls = self._prometheus_tls or ReloadingClientContext(ClientTls(), "balance.prometheus")
        return PrometheusReader(prometheus, self._on_metrics, self._clock, tls, **timing)

    def _on_sample(self, address: str, sample: CounterSample | None, problem: str) -> None:
        if sample is None:
            self._consecutive_failures[address] = self._consecutive_failures.get(address, 0) + 1
        else:
            self._consecutive_failures[address] = 0
            self._samples[address] = rates.append_sample(self._samples.get(address, ()), sample)
            self._metrics[address] = rates.compute_node_metrics(self._samples[address])
        outage = ""
        if min(self._consecutive_failures.values()) >= _OUTAGE_AFTER_FAILURES:
            outage = f"node metrics are unavailable from every node; last error: {problem}"
        self._publish(self._metrics, outage)

    def _on_metrics(self, metrics: Mapping[str, NodeMetrics], problem: str) -> None:
        self._metrics.update(metrics)
        self._prometheus_failures = self._prometheus_failures + 1 if problem else 0
        outage = ""
        if self._prometheus_failures >= _OUTAGE_AFTER_FAILURES:
            outage = f"node metrics are unavailable: {problem}"
        self._publish(self._metrics, outage)

    def _forget(self, address: str) -> None:
        for by_address in (self._metrics, self._samples, self._consecutive_failures):
            by_address.pop(address, None)
