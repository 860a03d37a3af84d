"""Prometheus metrics from the reports of the Tidevoy modules in the Envoys. No I/O.

Each Envoy has its own series: sums over all Envoys would decrease when an Envoy is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS, ModuleReport, Traffic

_LE_BOUNDS = (*(str(bound) for bound in LATENCY_BOUNDS_SECONDS), "+Inf")

# Field of `Traffic` -> (name of the metric, documentation, labels besides `envoy` and `node`).
_GAUGES = {
    "sessions": ("sessions", "Sessions by state.", ["state"]),
    "not_movable": ("sessions_pinned", "Sessions that cannot migrate, by reason.", ["reason"]),
}
_COUNTERS = {
    "login_failures": ("login_failures", "Failed logins, by reason.", ["reason"]),
    "connect_failures": (
        "connect_failures",
        "Connections to the node that failed before the client received data, by reason.",
        ["reason"],
    ),
    "commands": ("commands", "Client commands, by kind.", ["kind"]),
    "errors": ("errors", "Error responses of the node, by class.", ["class"]),
    "bytes": ("bytes", "Bytes transferred, by direction.", ["direction"]),
    "migrations": (
        "migrations",
        "Attempts to migrate a session away from the node, by result and reason.",
        ["result", "reason"],
    ),
}

# Log -> documentation of its lines, and of its errors.
_LOGS = {
    "login_log": (
        "Lines of the login log, by result. Dropped lines had no room in the queue, or could not be written"
        " before the log was closed.",
        "Failed attempts to write or rotate the login log. The lines are kept and retried.",
    ),
    "statement_log": (
        "Statements of the statement log, by result. Dropped ones had no room in the queue, or could not be"
        " written before the log was closed.",
        "Failed attempts to write or rotate the statement log. The statements are kept and retried.",
    ),
}


_CAPTURE_COUNTS = {
    "records": "Records that the present or last capture of traffic has written.",
    "dropped": "Records that are missing in it, because the disk was slow or full, or a request too long.",
    "filtered": "Statements that it left out, because they hold secrets.",
    "bytes": "Bytes of its files.",
    "write_errors": "Failed attempts to write its files.",
}


def module_metric_families(reports: Iterable[ModuleReport]) -> Iterator[Metric]:
    """Yield all metric families, which are empty without module reports."""
    all_reports = list(reports)
    info = GaugeMetricFamily(
        "tidevoy_module_info", "Version of the module in the Envoy; always 1.", labels=["envoy", "version"]
    )
    dropped = CounterMetricFamily(
        "tidevoy_telemetry_dropped",
        "Series of the Envoy's module that the control plane ignored, because they are malformed, or because"
        " their node or another label is unknown.",
        labels=["envoy"],
    )
    ejected = GaugeMetricFamily(
        "tidevoy_node_ejected_since",
        "Unix time at which the Envoy ejected the node, which gets no new sessions from it."
        " No series without an ejection.",
        labels=["envoy", "node", "reason"],
    )
    for report in all_reports:
        info.add_metric([report.envoy, report.version], 1)
        dropped.add_metric([report.envoy], report.dropped_series)
        for node, ejection in report.ejections.items():
            ejected.add_metric([report.envoy, node, ejection.reason], ejection.since)
    yield from (info, dropped, ejected, *_log_families(all_reports), *_capture_families(all_reports))
    rows = [
        ([report.envoy, node], traffic) for report in all_reports for node, traffic in report.nodes.items()
    ]
    for field, (name, documentation, labels) in (_GAUGES | _COUNTERS).items():
        family_class = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
        family = family_class(f"tidevoy_{name}", documentation, labels=["envoy", "node", *labels])
        for base_labels, traffic in rows:
            for key, count in getattr(traffic, field).items():
                family.add_metric([*base_labels, *([key] if isinstance(key, str) else key)], count)
        yield family
    yield from _logins_and_latency(rows)


def _log_families(reports: Iterable[ModuleReport]) -> Iterator[Metric]:
    for log, (lines_text, errors_text) in _LOGS.items():
        lines = CounterMetricFamily(f"tidevoy_{log}_lines", lines_text, labels=["envoy", "result"])
        errors = CounterMetricFamily(f"tidevoy_{log}_write_errors", errors_text, labels=["envoy"])
        for report in reports:
            if (counts := report.logs.get(log)) is not None:
                lines.add_metric([report.envoy, "written"], counts.written)
                lines.add_metric([report.envoy, "dropped"], counts.dropped)
                errors.add_metric([report.envoy], counts.write_errors)
        yield from (lines, errors)


def _capture_families(reports: Iterable[ModuleReport]) -> Iterator[Metric]:
    captures = [(report.envoy, report.capture) for report in reports if report.capture is not None]
    active = GaugeMetricFamily(
        "tidevoy_capture_active", "1 while the Envoy captures traffic.", labels=["envoy"]
    )
    waiting = GaugeMetricFamily(
        "tidevoy_capture_sessions_waiting",
        "Open sessions of which nothing is captured yet, because their nodes have not exported their states.",
        labels=["envoy"],
    )
    for envoy, counts in captures:
        active.add_metric([envoy], counts.is_active)
        waiting.add_metric([envoy], counts.waiting)
    yield from (active, waiting)
    for name, documentation in _CAPTURE_COUNTS.items():
        # The counts begin at zero with each capture, which Prometheus takes for a restart.
        family = CounterMetricFamily(f"tidevoy_capture_{name}", documentation, labels=["envoy"])
        for envoy, counts in captures:
            family.add_metric([envoy], getattr(counts, name))
        yield family


def _logins_and_latency(rows: Iterable[tuple[list[str], Traffic]]) -> Iterator[Metric]:
    labels = ["envoy", "node"]
    logins = CounterMetricFamily("tidevoy_logins", "Successful logins.", labels=labels)
    latency = HistogramMetricFamily(
        "tidevoy_command_seconds", "Seconds from a command to the end of its response.", labels=labels
    )
    duration = HistogramMetricFamily(
        "tidevoy_migration_duration_seconds",
        "Duration of session migrations away from the node, in seconds.",
        labels=labels,
    )
    for base_labels, traffic in rows:
        if not base_labels[1]:
            continue  # counters without a node
        logins.add_metric(base_labels, traffic.logins)
        latency.add_metric(base_labels, _with_bounds(traffic.latency_buckets), traffic.latency_sum_seconds)
        duration.add_metric(
            base_labels, _with_bounds(traffic.migration_buckets), traffic.migration_sum_seconds
        )
    yield from (logins, latency, duration)


def _with_bounds(buckets: tuple[int, ...]) -> list[tuple[str, float]]:
    return list(zip(_LE_BOUNDS, buckets, strict=True))
