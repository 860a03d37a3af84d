"""Prometheus metrics of what the modules in Envoys tell. Pure.

Each Envoy has its own series, as it told them: counters that begin again when an Envoy restarts are what
Prometheus expects of a process, while a sum over Envoys would fall when one of them is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS, Counts, ModuleReport, Traffic

_LE_BOUNDS = (*(str(bound) for bound in LATENCY_BOUNDS_SECONDS), "+Inf")


def module_metric_families(reports: Iterable[ModuleReport]) -> Iterator[Metric]:
    """One family after the other; a family without series when no module has told anything."""
    all_reports = list(reports)
    info = GaugeMetricFamily(
        "tidevoy_module_info", "1 for the version of the module in the Envoy.", labels=["envoy", "version"]
    )
    dropped = CounterMetricFamily(
        "tidevoy_telemetry_dropped",
        "Series of the Envoy's module that were left out: of a node that is not known, or unreadable.",
        labels=["envoy"],
    )
    for report in all_reports:
        info.add_metric([report.envoy, report.version], 1)
        dropped.add_metric([report.envoy], report.dropped_series)
    ejected = GaugeMetricFamily(
        "tidevoy_node_ejected_since",
        "Since when the Envoy has ejected the node, in Unix time; the node gets no new sessions from it."
        " Without an ejection there is no series.",
        labels=["envoy", "node", "reason"],
    )
    for report in all_reports:
        for node, ejection in report.ejections.items():
            ejected.add_metric([report.envoy, node, ejection.reason], ejection.since)
    yield from (info, dropped, ejected)
    rows = [(report.envoy, node, part) for report in all_reports for node, part in report.nodes.items()]
    for family, counts in _count_families():
        for envoy, node, part in rows:
            for label_value, count in counts(part).items():
                family.add_metric([envoy, node, label_value], count)
        yield family
    yield _migrations(rows)
    yield from _logins_and_latency(rows)


def _migrations(rows: Iterable[tuple[str, str, Traffic]]) -> Metric:
    migrations = CounterMetricFamily(
        "tidevoy_migrations",
        "Tries to move a session away from the node, by how they ended.",
        labels=["envoy", "node", "result", "reason"],
    )
    for envoy, node, part in rows:
        for (result, reason), count in part.migrations.items():
            migrations.add_metric([envoy, node, result, reason], count)
    return migrations


def _count_families() -> Iterator[
    tuple[GaugeMetricFamily | CounterMetricFamily, Callable[[Traffic], Counts]]
]:
    by = ["envoy", "node"]
    yield (
        GaugeMetricFamily("tidevoy_sessions", "Sessions by what they are doing.", labels=[*by, "state"]),
        lambda part: part.sessions,
    )
    yield (
        GaugeMetricFamily(
            "tidevoy_sessions_pinned", "Sessions that cannot be moved, by why.", labels=[*by, "reason"]
        ),
        lambda part: part.not_movable,
    )
    yield (
        CounterMetricFamily("tidevoy_login_failures", "Logins that failed, by why.", labels=[*by, "reason"]),
        lambda part: part.login_failures,
    )
    yield (
        CounterMetricFamily(
            "tidevoy_connect_failures",
            "Connections to the node that came to nothing before a client saw them, by why.",
            labels=[*by, "reason"],
        ),
        lambda part: part.connect_failures,
    )
    yield (
        CounterMetricFamily("tidevoy_commands", "Commands of clients, by kind.", labels=[*by, "kind"]),
        lambda part: part.commands,
    )
    yield (
        CounterMetricFamily("tidevoy_errors", "Errors that the node answered.", labels=[*by, "class"]),
        lambda part: part.errors,
    )
    yield (
        CounterMetricFamily("tidevoy_bytes", "Bytes carried.", labels=[*by, "direction"]),
        lambda part: part.bytes,
    )


def _logins_and_latency(rows: Iterable[tuple[str, str, Traffic]]) -> Iterator[Metric]:
    by = ["envoy", "node"]
    logins = CounterMetricFamily("tidevoy_logins", "Logins that succeeded.", labels=by)
    latency = HistogramMetricFamily(
        "tidevoy_command_seconds",
        "Time from a command to the end of its response, in seconds.",
        labels=by,
    )
    duration = HistogramMetricFamily(
        "tidevoy_migration_duration_seconds",
        "Time that sessions took to move away from the node, in seconds.",
        labels=by,
    )
    for envoy, node, part in rows:
        if not node:
            continue
        logins.add_metric([envoy, node], part.logins)
        latency.add_metric(
            [envoy, node], _with_bounds(part.latency_buckets), sum_value=part.latency_sum_seconds
        )
        duration.add_metric(
            [envoy, node], _with_bounds(part.migration_buckets), sum_value=part.migration_sum_seconds
        )
    yield from (logins, latency, duration)


def _with_bounds(buckets: tuple[int, ...]) -> list[tuple[str, float]]:
    return list(zip(_LE_BOUNDS, buckets, strict=True))
