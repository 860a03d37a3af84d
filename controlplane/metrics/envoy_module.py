"""Prometheus metrics from the reports of the modules in the Envoys. No I/O.

Each Envoy has its own series, with the values that it reported. Prometheus expects that the counters of a
process restart with it, while a sum over all Envoys would fall when one of them is forgotten.
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
    """Yield all metric families; without module reports they have no series."""
    all_reports = list(reports)
    info = GaugeMetricFamily(
        "tidevoy_module_info", "Version of the module in the Envoy; always 1.", labels=["envoy", "version"]
    )
    dropped = CounterMetricFamily(
        "tidevoy_telemetry_dropped",
        "Series of the Envoy's module that were dropped: of an unknown node, or unreadable.",
        labels=["envoy"],
    )
    for report in all_reports:
        info.add_metric([report.envoy, report.version], 1)
        dropped.add_metric([report.envoy], report.dropped_series)
    ejected = GaugeMetricFamily(
        "tidevoy_node_ejected_since",
        "Unix time at which the Envoy ejected the node, which gets no new sessions from it."
        " No series without an ejection.",
        labels=["envoy", "node", "reason"],
    )
    for report in all_reports:
        for node, ejection in report.ejections.items():
            ejected.add_metric([report.envoy, node, ejection.reason], ejection.since)
    yield from (info, dropped, ejected)
    rows = [(report.envoy, node, traffic) for report in all_reports for node, traffic in report.nodes.items()]
    for family, counts in _count_families():
        for envoy, node, traffic in rows:
            for label_value, count in counts(traffic).items():
                family.add_metric([envoy, node, label_value], count)
        yield family
    yield _migrations(rows)
    yield from _logins_and_latency(rows)


def _migrations(rows: Iterable[tuple[str, str, Traffic]]) -> Metric:
    migrations = CounterMetricFamily(
        "tidevoy_migrations",
        "Attempts to migrate a session away from the node, by result and reason.",
        labels=["envoy", "node", "result", "reason"],
    )
    for envoy, node, traffic in rows:
        for (result, reason), count in traffic.migrations.items():
            migrations.add_metric([envoy, node, result, reason], count)
    return migrations


def _count_families() -> Iterator[
    tuple[GaugeMetricFamily | CounterMetricFamily, Callable[[Traffic], Counts]]
]:
    base_labels = ["envoy", "node"]
    yield (
        GaugeMetricFamily("tidevoy_sessions", "Sessions by state.", labels=[*base_labels, "state"]),
        lambda traffic: traffic.sessions,
    )
    yield (
        GaugeMetricFamily(
            "tidevoy_sessions_pinned",
            "Sessions that cannot migrate, by reason.",
            labels=[*base_labels, "reason"],
        ),
        lambda traffic: traffic.not_movable,
    )
    yield (
        CounterMetricFamily(
            "tidevoy_login_failures", "Failed logins, by reason.", labels=[*base_labels, "reason"]
        ),
        lambda traffic: traffic.login_failures,
    )
    yield (
        CounterMetricFamily(
            "tidevoy_connect_failures",
            "Connections to the node that failed before the client received data, by reason.",
            labels=[*base_labels, "reason"],
        ),
        lambda traffic: traffic.connect_failures,
    )
    yield (
        CounterMetricFamily("tidevoy_commands", "Client commands, by kind.", labels=[*base_labels, "kind"]),
        lambda traffic: traffic.commands,
    )
    yield (
        CounterMetricFamily(
            "tidevoy_errors",
            "Error responses of the node, by class.",
            labels=[*base_labels, "class"],
        ),
        lambda traffic: traffic.errors,
    )
    yield (
        CounterMetricFamily(
            "tidevoy_bytes", "Bytes transferred, by direction.", labels=[*base_labels, "direction"]
        ),
        lambda traffic: traffic.bytes,
    )


def _logins_and_latency(rows: Iterable[tuple[str, str, Traffic]]) -> Iterator[Metric]:
    base_labels = ["envoy", "node"]
    logins = CounterMetricFamily("tidevoy_logins", "Successful logins.", labels=base_labels)
    latency = HistogramMetricFamily(
        "tidevoy_command_seconds",
        "Seconds from a command to the end of its response.",
        labels=base_labels,
    )
    duration = HistogramMetricFamily(
        "tidevoy_migration_duration_seconds",
        "Duration of session migrations away from the node, in seconds.",
        labels=base_labels,
    )
    for envoy, node, traffic in rows:
        if not node:
            continue
        logins.add_metric([envoy, node], traffic.logins)
        latency.add_metric(
            [envoy, node], _with_bounds(traffic.latency_buckets), sum_value=traffic.latency_sum_seconds
        )
        duration.add_metric(
            [envoy, node], _with_bounds(traffic.migration_buckets), sum_value=traffic.migration_sum_seconds
        )
    yield from (logins, latency, duration)


def _with_bounds(buckets: tuple[int, ...]) -> list[tuple[str, float]]:
    return list(zip(_LE_BOUNDS, buckets, strict=True))
