"""Keeps what is known of the nodes' vital signs up to date, from the one source that the settings choose.

That is the nodes' own `/metrics`, or a Prometheus that reads them anyway. What was known of a node stays when
nothing can be read any more: each reading has its time, by which those who use it judge.
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
"""So many nodes are read directly, at most: more would cost this process too much of its core."""

_OUTAGE_AFTER_FAILURES = (
    3  # so often in a row every node, or Prometheus, must fail before the source counts as failed
)


class NodeMetricsObserver:
    """Reads; `publish` takes all that is known, by address, and why nothing new comes (empty: it does)."""

    def __init__(
        self, settings: Settings, publish: Callable[[Mapping[str, NodeMetrics], str], None], clock: Clock
    ) -> None:
        """ConfigError: TLS files that cannot be used."""
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
        self._consecutive_failures: dict[str, int] = {}  # in a row, by address
        self._prometheus_failures = 0  # the same of Prometheus
        self._source: MetricsScraper | PrometheusReader | None = None
        self._source_changed = asyncio.Event()

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """The whole set of nodes, in place of the former one; what vanished is forgotten."""
        for address in [a for a, target in self._targets.items() if targets.get(a) != target]:
            self._forget(address)
        self._targets = targets
        if (self._source is None) != (self._disabled_reason() is not None):
            self._source_changed.set()
        elif self._source is not None:
            self._source.set_targets(targets)

    def configure(self, settings: Settings) -> None:
        """Apply new settings; what TLS needs stays as it was at the start."""
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
        """Why nothing is read, "" if that is as it should be; None: something is."""
        if not self._balance.needs_node_metrics:
            return ""
        if self._balance.prometheus.url is None:
            count = sum(target.status_endpoint is not None for target in self._targets.values())
            if count > MAX_SCRAPED_NODES:
                return (
                    f"CPU, memory and health are not read: there are {count} nodes, and at most {MAX_SCRAPED_NODES}"
                    " are read directly; set balance.prometheus.url to read them from a Prometheus"
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
            outage = f"no node lets its CPU, memory and health be read; the last one: {problem}"
        self._publish(self._metrics, outage)

    def _on_metrics(self, metrics: Mapping[str, NodeMetrics], problem: str) -> None:
        self._metrics.update(metrics)
        self._prometheus_failures = self._prometheus_failures + 1 if problem else 0
        outage = ""
        if self._prometheus_failures >= _OUTAGE_AFTER_FAILURES:
            outage = f"CPU, memory and health of the nodes cannot be read: {problem}"
        self._publish(self._metrics, outage)

    def _forget(self, address: str) -> None:
        for known in (self._metrics, self._samples, self._consecutive_failures):
            known.pop(address, None)
