"""Reads the metrics of all nodes from a Prometheus server periodically."""

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
    """Queries Prometheus; `on_metrics` gets the metrics by node address and a problem ("": none)."""

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
        self._address_by_name: Mapping[str, str] = {}  # node addresses by their possible names in Prometheus
        self._label_sets = [settings.labels] if settings.labels else list(series.DEFAULT_LABEL_SETS)

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes."""
        self._address_by_name = series.addresses_by_name(targets)

    async def run(self) -> None:
        """Query until cancelled."""
        loop = asyncio.get_running_loop()
        fetcher = HttpFetcher(self._tls)
        try:
            while True:
                started_at = loop.time()
                try:
                    metrics_by_name = await self._read(fetcher)
                except (FetchError, series.InvalidPrometheusResponse, OSError) as error:
                    self._on_metrics({}, self._describe_error(error))
                else:
                    self._deliver(metrics_by_name)
                await asyncio.sleep(next_probe_at(started_at, self._interval, loop.time()) - loop.time())
        finally:
            await fetcher.close()

    def _deliver(self, metrics_by_name: Mapping[str, NodeMetrics]) -> None:
        metrics_by_address = {
            self._address_by_name[name]: metrics
            for name, metrics in metrics_by_name.items()
            if name in self._address_by_name
        }
        problem = ""
        if self._address_by_name and not metrics_by_address:
            label = self._settings.instance_label
            problem = (
                f"{self._url} has no metrics of the nodes: no TiDB series has the name of a node as its"
                f" {label}; check balance.prometheus.labels and instance_label"
            )
        self._on_metrics(metrics_by_address, problem)

    async def _read(self, fetcher: HttpFetcher) -> Mapping[str, NodeMetrics]:
        """Return the metrics by the value of the instance label.

        Raises FetchError, InvalidPrometheusResponse, or OSError if the token file is unreadable.
        """
        headers = await self._headers()
        for labels in self._label_sets:
            queries = series.build_queries(labels, self._settings.instance_label)
            ages = await self._query(fetcher, queries.pop(series.AGE_QUERY), headers)
            now = self._clock()
            if ages:
                self._label_sets.sort(key=lambda label_set: label_set != labels)  # try it first the next time
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

    def _describe_error(self, error: Exception) -> str:
        if isinstance(error, series.InvalidPrometheusResponse):
            return f"{self._url} {error}"
        if isinstance(error, OSError):
            return f"balance.prometheus.bearer_token_file cannot be read: {error.strerror}"
        return str(error)


def _read_token(path: Path) -> str:
    with path.open("rb") as file:
        token = file.read(_MAX_TOKEN_BYTES).decode("latin-1").strip()
    # Checked here, because an error about the header would contain the token.
    if not (token.isascii() and token.isprintable() and token) or " " in token:
        raise FetchError(
            "balance.prometheus.bearer_token_file does not hold a token"
            " (one line of printable ASCII without spaces)"
        )
    return token
