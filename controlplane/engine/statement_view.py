"""The statistics of statements that API, console and command line show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.decide.views import envoys_without_module
from controlplane.engine.cluster_view import ClusterView
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.statements import StatementQuery, StatementSummaries
from controlplane.observe.statements.collector import StatementCollector
from controlplane.observe.statements.summary import summarize
from controlplane.replicas.peer_sync import ReplicaOutage
from controlplane.replicas.replica_set import ReplicaSet
from controlplane.texts import some_of

# A shorter outage is not reported: a replica that joins is followed some moments later.
_MIN_OUTAGE_SECONDS = 1.0
_MAX_ENVOYS_NAMED = 5


@dataclass(frozen=True, slots=True)
class StatementListing:
    """The answer to a query, and the period that it covers.

    `incomplete`: what is missing, one sentence each.
    """

    is_on: bool
    since: float
    window_seconds: float
    summaries: StatementSummaries
    incomplete: tuple[str, ...]


class StatementView:
    """Reads the statistics of all Envoys, also those that report to other replicas."""

    def __init__(
        self, collector: StatementCollector, cluster: ClusterView, replicas: ReplicaSet | None
    ) -> None:
        self._collector = collector
        self._cluster = cluster
        self._replicas = replicas

    async def list(self, query: StatementQuery, seconds: float) -> StatementListing:
        """Return the statements of at least the last `seconds` that match the query."""
        window = self._collector.window(seconds)
        # An hour can have 145,000 rows; summing them takes up to half a second.
        summaries = await asyncio.to_thread(summarize, window, query)
        incomplete = (*self._missing_replicas(window.since), *self._missing_envoys())
        return StatementListing(
            is_on=self._collector.is_on,
            since=window.since,
            window_seconds=window.seconds,
            summaries=summaries,
            incomplete=incomplete if self._collector.is_on else (),
        )

    def _missing_replicas(self, since: float) -> Iterator[str]:
        outages = self._replicas.outages() if self._replicas is not None else ()
        yield from describe_outages(outages, since, self._cluster.now())

    def _missing_envoys(self) -> Iterator[str]:
        yield from describe_envoys_without_module(view.status for view in self._cluster.envoys(traffic=False))


def describe_outages(outages: Iterable[ReplicaOutage], since: float, now: float) -> Iterator[str]:
    """Return the outages of replicas after `since`, one sentence each."""
    for outage in outages:
        until = now if outage.until is None else outage.until
        if until <= since or until - outage.since < _MIN_OUTAGE_SECONDS:
            continue
        end = "now" if outage.until is None else _time(outage.until)
        yield (
            f"the control plane {outage.replica} could not be reached from {_time(outage.since)} until {end};"
            " statements of its Envoys from this time are missing"
        )


def describe_envoys_without_module(statuses: Iterable[EnvoyStatus]) -> Iterator[str]:
    """Return a sentence about connected Envoys that cannot report statements, if there are any."""
    if names := envoys_without_module(statuses):
        named = some_of(names, _MAX_ENVOYS_NAMED)
        yield f"without Tidevoy's module, these Envoys report no statements: {named}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
