"""Asks a Prometheus for the vital signs of all nodes, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from controlplane.clock import Clock
from controlplane.config.balance import Prometheus
from controlplane.model.node_metrics import Vitals
from controlplane.observe.health.client_tls import ClientContext
from controlplane.observe.health.health_checker import Target, next_start
from controlplane.observe.node_metrics import promql as series
from controlplane.observe.node_metrics.http_fetcher import NoPage, Pages

_LONGEST_TOKEN = 64 * 1024


class PrometheusReader:
    """Reads; `take` hears what is known of which nodes after each time, or nothing and why."""

    def __init__(
        self,
        settings: Prometheus,
        take: Callable[[Mapping[str, Vitals], str], None],
        clock: Clock,
        tls: ClientContext | None,
        *,
        interval: float,
        timeout: float,
    ) -> None:
        self._settings = settings
        self._url = f"{settings.url}/api/v1/query"
        self._take = take
        self._clock = clock
        self._tls = tls
        self._interval, self._timeout = interval, timeout
        self._named: Mapping[str, str] = {}  # addresses by what names them there
        self._labels = [settings.labels] if settings.labels else list(series.USUAL_LABELS)

    def watch(self, targets: Mapping[str, Target]) -> None:
        """The whole set of nodes, in place of the former one."""
        self._named = series.names(targets)

    async def run(self) -> None:
        """Ask until cancelled."""
        loop = asyncio.get_running_loop()
        pages = Pages(self._tls)
        try:
            while True:
                start = loop.time()
                try:
                    found = await self._read(pages)
                except (NoPage, series.Unreadable, OSError) as problem:
                    self._take({}, self._outage(problem))
                else:
                    self._hand_on(found)
                await asyncio.sleep(next_start(start, self._interval, loop.time()) - loop.time())
        finally:
            await pages.close()

    def _hand_on(self, found: Mapping[str, Vitals]) -> None:
        ours = {self._named[name]: vitals for name, vitals in found.items() if name in self._named}
        problem = ""
        if self._named and not ours:
            label = self._settings.instance_label
            problem = (
                f"{self._url} knows none of the nodes: no series of TiDB there has one's name as {label};"
                " see balance.prometheus.labels and instance_label"
            )
        self._take(ours, problem)

    async def _read(self, pages: Pages) -> Mapping[str, Vitals]:
        """What it knows, by the label that names nodes. NoPage, Unreadable; OSError: no token can be read."""
        headers = await self._headers()
        for labels in self._labels:
            queries = series.queries(labels, self._settings.instance_label)
            ages = await self._ask(pages, queries.pop(series.AGE), headers)
            now = self._clock()
            if ages:
                self._labels.sort(key=lambda tried: tried != labels)  # the next time it is the first
                answers = {name: await self._ask(pages, query, headers) for name, query in queries.items()}
                return series.vitals({series.AGE: ages, **answers}, now)
        return {}

    async def _ask(self, pages: Pages, query: str, headers: Mapping[str, str]) -> dict[str, float]:
        body = bytearray()
        await pages.get(self._url, body.extend, self._timeout, params={"query": query}, headers=headers)
        return series.values(bytes(body), self._settings.instance_label)

    async def _headers(self) -> Mapping[str, str]:
        path = self._settings.bearer_token_file
        if path is None:
            return {}
        return {"Authorization": f"Bearer {await asyncio.to_thread(_token, path)}"}

    def _outage(self, problem: Exception) -> str:
        if isinstance(problem, series.Unreadable):
            return f"{self._url} {problem}"
        if isinstance(problem, OSError):
            return f"balance.prometheus.bearer_token_file cannot be read: {problem.strerror}"
        return str(problem)


def _token(path: Path) -> str:
    with path.open("rb") as file:
        token = file.read(_LONGEST_TOKEN).decode("latin-1").strip()
    # Told here: an error of the header that it goes into would show the token.
    if not (token.isascii() and token.isprintable() and token) or " " in token:
        raise NoPage("balance.prometheus.bearer_token_file holds no token: that is one word of plain ASCII")
    return token
