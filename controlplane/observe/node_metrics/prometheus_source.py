"""Reads the counters of all nodes from a Prometheus server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from controlplane.clock import Clock
from controlplane.config.balance import PrometheusSettings
from controlplane.config.bearer_token import InvalidTokenFile, read_bearer_token
from controlplane.model.node_metrics import CounterSample
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics import promql
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher


class PrometheusReader:
    def __init__(self, settings: PrometheusSettings, tls: ReloadingClientContext | None) -> None:
        self._settings = settings
        self._url = f"{settings.url}/api/v1/query"
        self._fetcher = HttpFetcher(tls)
        self._address_by_name: Mapping[str, str] = {}  # node addresses by their possible names in Prometheus
        self._label_sets = [settings.labels] if settings.labels else list(promql.DEFAULT_LABEL_SETS)

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        self._address_by_name = promql.addresses_by_name(targets)

    async def read(self, clock: Clock, timeout: float) -> dict[str, CounterSample]:
        """Return the samples by node address. Raises FetchError, also after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._read(clock, timeout)
        except TimeoutError:
            raise FetchError(f"{self._url} does not answer all queries within {timeout:g} s") from None

    async def _read(self, clock: Clock, timeout: float) -> dict[str, CounterSample]:
        headers = await self._headers()
        for labels in self._label_sets:
            queries = promql.build_queries(labels, self._settings.instance_label)
            ages = await self._query({"query": queries.pop(promql.AGE_QUERY)}, headers, timeout)
            now = clock()
            if ages.evaluated_at is None:
                continue
            self._label_sets.sort(key=lambda label_set: label_set != labels)  # try these first next time
            # All queries are for the same time, so that `ages` applies to all values.
            time = repr(ages.evaluated_at)
            values = {
                field: (await self._query({"query": query, "time": time}, headers, timeout)).values
                for field, query in queries.items()
            }
            return self._samples(ages.values, values, now)
        return self._samples({}, {}, 0.0)

    async def close(self) -> None:
        await self._fetcher.close()

    def _samples(
        self, ages: Mapping[str, float], values: Mapping[str, Mapping[str, float]], now: float
    ) -> dict[str, CounterSample]:
        samples = {
            self._address_by_name[name]: CounterSample(
                now - max(age, 0.0), **{field: by_name.get(name) for field, by_name in values.items()}
            )
            for name, age in ages.items()
            if name in self._address_by_name
        }
        if self._address_by_name and not samples:
            raise FetchError(
                f"{self._url} has no metrics of the nodes: no TiDB series has the name of a node as its"
                f" {self._settings.instance_label}; check balance.prometheus.labels and instance_label"
            )
        return samples

    async def _query(
        self, params: Mapping[str, str], headers: Mapping[str, str], timeout: float
    ) -> promql.InstantVector:
        body = await self._fetcher.get(self._url, timeout, params=params, headers=headers)
        try:
            return promql.parse_vector(body, self._settings.instance_label)
        except ValueError as error:
            raise FetchError(f"{self._url} does not answer like Prometheus") from error

    async def _headers(self) -> Mapping[str, str]:
        path = self._settings.bearer_token_file
        if path is None:
            return {}
        try:
            token = await asyncio.to_thread(read_bearer_token, path)
        except InvalidTokenFile as error:
            raise FetchError(f"balance.prometheus.bearer_token_file {error}") from error
        return {"Authorization": f"Bearer {token}"}
