"""Asks a Prometheus for the vital signs of all nodes, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from controlplane.clock import Clock
from controlplane.config.balance import PrometheusSettings
from controlplane.model.node_metrics import NodeMetrics
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import CheckTarget, next_probe_at
from controlplane.observe.node_metrics import promql as series
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher

_MAX_TOKEN_BYTES = 64 * 1024


class PrometheusReader:
    """Reads; `take` hears what is known of which nodes after each time, or nothing and why."""

    def __init__(
        self,
        settings: PrometheusSettings,
        on_metrics: Callable[[Mapping[str, NodeMetrics], str], None],
        clock: Clock,
        tls: ReloadingClientContext | None,
        *,
        interval: float,
        timeout: float,
    ) -> None:
        self._settings = settings
        self._url = f"{settings.url}/api/v1/query"
        self._on_metrics = on_metrics
        self._clock = clock
        self._tls = tls
        self._interval, self._timeout = interval, timeout
        self._address_by_name: Mapping[str, str] = {}  # addresses by what names them there
        self._label_sets = [settings.labels] if settings.labels else list(series.DEFAULT_LABEL_SETS)

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """The whole set of nodes, in place of the former one."""
        self._address_by_name = series.addresses_by_name(targets)

    async def run(self) -> None:
        """Ask until cancelled."""
        loop = asyncio.get_running_loop()
        fetcher = HttpFetcher(self._tls)
        try:
            while True:
                started_at = loop.time()
                try:
                    found = await self._read(fetcher)
                except (FetchError, series.InvalidPrometheusResponse, OSError) as problem:
                    self._on_metrics({}, self._describe_error(problem))
                else:
                    self._deliver(found)
                await asyncio.sleep(next_probe_at(started_at, self._interval, loop.time()) - loop.time())
        finally:
            await fetcher.close()

    def _deliver(self, metrics_by_name: Mapping[str, NodeMetrics]) -> None:
        metrics_by_address = {
            self._address_by_name[name]: vitals
            for name, vitals in metrics_by_name.items()
            if name in self._address_by_name
        }
        problem = ""
        if self._address_by_name and not metrics_by_address:
            label = self._settings.instance_label
            problem = (
                f"{self._url} knows none of the nodes: no series of TiDB there has one's name as {label};"
                " see balance.prometheus.labels and instance_label"
            )
        self._on_metrics(metrics_by_address, problem)

    async def _read(self, fetcher: HttpFetcher) -> Mapping[str, NodeMetrics]:
        """What it knows, by the label that names nodes. NoPage, Unreadable; OSError: no token can be read."""
        headers = await self._headers()
        for labels in self._label_sets:
            queries = series.build_queries(labels, self._settings.instance_label)
            ages = await self._query(fetcher, queries.pop(series.AGE_QUERY), headers)
            now = self._clock()
            if ages:
                self._label_sets.sort(key=lambda tried: tried != labels)  # the next time it is the first
                answers = {
                    name: await self._query(fetcher, query, headers) for name, query in queries.items()
                }
                return series.node_metrics_by_name({series.AGE_QUERY: ages, **answers}, now)
        return {}

    async def _query(self, fetcher: HttpFetcher, query: str, headers: Mapping[str, str]) -> dict[str, float]:
        body = bytearray()
        await fetcher.get(self._url, body.extend, self._timeout, params={"query": query}, headers=headers)
        return series.parse_values(bytes(body), self._settings.instance_label)

    async def _headers(self) -> Mapping[str, str]:
        path = self._settings.bearer_token_file
        if path is None:
            return {}
        return {"Authorization": f"Bearer {await asyncio.to_thread(_read_token, path)}"}

    def _describe_error(self, problem: Exception) -> str:
        if isinstance(problem, series.InvalidPrometheusResponse):
            return f"{self._url} {problem}"
        if isinstance(problem, OSError):
            return f"balance.prometheus.bearer_token_file cannot be read: {problem.strerror}"
        return str(problem)


def _read_token(path: Path) -> str:
    with path.open("rb") as file:
        token = file.read(_MAX_TOKEN_BYTES).decode("latin-1").strip()
    # Told here: an error of the header that it goes into would show the token.
    if not (token.isascii() and token.isprintable() and token) or " " in token:
        raise FetchError(
            "balance.prometheus.bearer_token_file holds no token: that is one word of plain ASCII"
        )
    return token
