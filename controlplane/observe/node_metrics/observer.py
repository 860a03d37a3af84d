"""Keeps what is known of the nodes' vital signs up to date, from the one source that the settings choose.

That is the nodes' own `/metrics`, or a Prometheus that reads them anyway. What was known of a node stays when
nothing can be read any more: each reading has its time, by which those who use it judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from controlplane.clock import Clock
from controlplane.config.settings import ClientTls, Settings
from controlplane.model.node_metrics import Sample, Vitals
from controlplane.observe.health.client_tls import ClientContext
from controlplane.observe.health.health_checker import Target
from controlplane.observe.node_metrics import rates
from controlplane.observe.node_metrics.prometheus_source import PrometheusReader
from controlplane.observe.node_metrics.scraper import MetricsScraper

MOST_NODES = 200
"""So many nodes are read directly, at most: more would cost this process too much of its core."""

_FAILURES = 3  # so often in a row every node, or Prometheus, must fail before the source counts as failed


class VitalsObserver:
    """Reads; `publish` takes all that is known, by address, and why nothing new comes (empty: it does)."""

    def __init__(
        self, settings: Settings, publish: Callable[[Mapping[str, Vitals], str], None], clock: Clock
    ) -> None:
        """ConfigError: TLS files that cannot be used."""
        self._balance = settings.balance
        self._publish = publish
        self._clock = clock
        status, ca = settings.health.status, settings.balance.prometheus.ca
        self._tls = ClientContext(status.client_tls, "health.status.client_tls") if status.tls else None
        self._prometheus_tls = ClientContext(ClientTls(ca=ca), "balance.prometheus") if ca else None
        self._targets: Mapping[str, Target] = {}
        self._vitals: dict[str, Vitals] = {}
        self._samples: dict[str, Sequence[Sample]] = {}
        self._failures: dict[str, int] = {}  # in a row, by address
        self._misses = 0  # the same of Prometheus
        self._source: MetricsScraper | PrometheusReader | None = None
        self._has_changed = asyncio.Event()

    def watch(self, targets: Mapping[str, Target]) -> None:
        """The whole set of nodes, in place of the former one; what vanished is forgotten."""
        for address in [a for a, target in self._targets.items() if targets.get(a) != target]:
            self._forget(address)
        self._targets = targets
        if (self._source is None) != (self._why_none() is not None):
            self._has_changed.set()
        elif self._source is not None:
            self._source.watch(targets)

    def configure(self, settings: Settings) -> None:
        """Apply new settings; what TLS needs stays as it was at the start."""
        if settings.balance != self._balance:
            self._balance = settings.balance
            self._has_changed.set()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._has_changed.clear()
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read())
                await self._has_changed.wait()
                reading.cancel()

    async def _read(self) -> None:
        reason = self._why_none()
        self._failures.clear()
        if reason is not None:
            self._source = None
            for address in self._targets:
                self._forget(address)
            self._publish(self._vitals, reason)
            return
        self._source = self._chosen()
        self._source.watch(self._targets)
        await self._source.run()

    def _why_none(self) -> str | None:
        """Why nothing is read, "" if that is as it should be; None: something is."""
        if not self._balance.reads_metrics:
            return ""
        if self._balance.prometheus.url is None:
            count = sum(target.status is not None for target in self._targets.values())
            if count > MOST_NODES:
                return (
                    f"CPU, memory and health are not read: there are {count} nodes, and at most {MOST_NODES}"
                    " are read directly; set balance.prometheus.url to read them from a Prometheus"
                )
        return None

    def _chosen(self) -> MetricsScraper | PrometheusReader:
        metrics, prometheus = self._balance.metrics, self._balance.prometheus
        pace = {"interval": metrics.interval, "timeout": metrics.timeout}
        if prometheus.url is None:
            return MetricsScraper(self._on_sample, self._clock, self._tls, **pace)
        tls = None
        if prometheus.url.startswith("https:"):
            tls = self._prometheus_tls or ClientContext(ClientTls(), "balance.prometheus")
        return PrometheusReader(prometheus, self._on_vitals, self._clock, tls, **pace)

    def _on_sample(self, address: str, sample: Sample | None, problem: str) -> None:
        if sample is None:
            self._failures[address] = self._failures.get(address, 0) + 1
        else:
            self._failures[address] = 0
            self._samples[address] = rates.kept(self._samples.get(address, ()), sample)
            self._vitals[address] = rates.vitals(self._samples[address])
        outage = ""
        if min(self._failures.values()) >= _FAILURES:
            outage = f"no node lets its CPU, memory and health be read; the last one: {problem}"
        self._publish(self._vitals, outage)

    def _on_vitals(self, vitals: Mapping[str, Vitals], problem: str) -> None:
        self._vitals.update(vitals)
        self._misses = self._misses + 1 if problem else 0
        outage = ""
        if self._misses >= _FAILURES:
            outage = f"CPU, memory and health of the nodes cannot be read: {problem}"
        self._publish(self._vitals, outage)

    def _forget(self, address: str) -> None:
        for known in (self._vitals, self._samples, self._failures):
            known.pop(address, None)
