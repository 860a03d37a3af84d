"""Prometheus metrics of the statements with the most time. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from controlplane.model.statements import COUNT, ERRORS, MICROSECONDS, ROWS, StatementCounts

_MICROSECONDS_PER_SECOND = 1e6
_COUNTERS = {
    "executions": ("Executions of the statement, since its digest is shown.", COUNT, 1.0),
    "errors": ("Executions of the statement that ended with an error.", ERRORS, 1.0),
    "seconds": (
        "Time from requests to the end of their responses.",
        MICROSECONDS,
        _MICROSECONDS_PER_SECOND,
    ),
    "rows": ("Rows in the results of the statement.", ROWS, 1.0),
}


def statement_metric_families(totals: Mapping[str, StatementCounts]) -> Iterator[Metric]:
    """Yield the counters of the digests that are shown. The text of a statement is never a label."""
    for name, (documentation, column, divisor) in _COUNTERS.items():
        family = CounterMetricFamily(f"tidevoy_statement_{name}", documentation, labels=["digest"])
        for digest, counts in totals.items():
            family.add_metric([digest], counts[column] / divisor)
        yield family
