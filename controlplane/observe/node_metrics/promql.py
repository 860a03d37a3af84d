"""Builds the PromQL queries for node metrics and parses the responses. No I/O.

One query per series returns it for all nodes (prometheus.io/docs/prometheus/latest/querying/api). A further
query returns the age of the newest sample by Prometheus's clock, which may differ from ours.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping

from controlplane import address as addresses
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics.exposition_parser import TIDB_SERIES
from controlplane.observe.node_metrics.rates import failure_ratio, metric_value

DEFAULT_LABEL_SETS: tuple[Mapping[str, str], ...] = ({"job": "tidb"}, {"component": "tidb"})
"""Labels that select TiDB's series: TiUP sets the first, TiDB Operator the second."""

AGE_QUERY = "age"
_MEMORY_GROWTH_QUERY = "growth"


class InvalidPrometheusResponse(Exception):
    """A response that Prometheus does not send; the text describes it, to follow the URL."""


def build_queries(labels: Mapping[str, str], instance_label: str) -> dict[str, str]:
    """Return the PromQL queries by name: one per field of `CounterSample`, memory growth, and age."""
    selectors = {
        series.field: _build_selector(series.name, labels, series.type_label) for series in TIDB_SERIES
    }
    queries_by_name = {AGE_QUERY: f"time() - timestamp({selectors['cpu_seconds']})"}
    for field, selector in selectors.items():
        if field == "cpu_seconds":
            # From the last two samples, as in TiProxy; TiUP's Prometheus scrapes every 15 s. `rate` divides
            # by the whole range, which makes a new node look idle.
            queries_by_name[field] = f"irate({selector}[2m])"
        elif field.startswith(("pd_", "tikv_")):
            queries_by_name[field] = f"sum by ({instance_label}) (increase({selector}[2m]))"
        else:
            queries_by_name[field] = selector
    queries_by_name[_MEMORY_GROWTH_QUERY] = f"deriv({selectors['memory_bytes']}[1m])"
    return queries_by_name


def parse_values(body: bytes, instance_label: str) -> dict[str, float]:
    """Return the values of a response by the instance label. Raises InvalidPrometheusResponse.

    Drops values that are not finite, and names that several series have: they are of different nodes.
    """
    try:
        document = json.loads(body)
        result = document["data"]["result"] if document["data"]["resultType"] == "vector" else None
        named_values = [
            (series["metric"].get(instance_label), float(series["value"][1])) for series in result or ()
        ]
        occurrences = Counter(name for name, _ in named_values)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise InvalidPrometheusResponse("does not answer like Prometheus") from None
    if result is None:
        raise InvalidPrometheusResponse("does not answer like Prometheus")
    return {
        name: value
        for name, value in named_values
        if isinstance(name, str) and occurrences[name] == 1 and math.isfinite(value)
    }


def node_metrics_by_name(answers: Mapping[str, Mapping[str, float]], now: float) -> dict[str, NodeMetrics]:
    """Combine the answers (values by query and instance label) to metrics by instance label.

    `now`: our time when Prometheus answered the age query.
    """
    return {
        name: _build_node_metrics(
            {query: values[name] for query, values in answers.items() if name in values}, now - max(age, 0.0)
        )
        for name, age in answers[AGE_QUERY].items()
    }


def addresses_by_name(targets: Mapping[str, CheckTarget]) -> dict[str, str]:
    """Return node addresses by all names that a label may contain, without names that fit two nodes.

    TiUP names a node by host:port of its status port, TiDB Operator by its pod, which is the first part of
    the host name (`basic-tidb-0.basic-tidb-peer.default.svc`).
    """
    candidates: dict[str, set[str]] = {}
    for address, target in targets.items():
        for name in _names_of(target):
            candidates.setdefault(name, set()).add(address)
    return {name: addresses_.pop() for name, addresses_ in candidates.items() if len(addresses_) == 1}


def _names_of(target: CheckTarget) -> set[str]:
    names = set()
    if target.status_endpoint is not None:
        names |= {
            target.status_endpoint,
            addresses.join(target.status_host, addresses.split(target.status_endpoint)[1]),
        }
    for host in (target.status_host, addresses.split(target.address)[0]):
        names.add(host)
        if addresses.literal_ip(host) is None:
            names.add(host.partition(".")[0])
    return names - {""}


def _build_node_metrics(results: Mapping[str, float], at: float) -> NodeMetrics:
    cpu_quota, memory_quota = results.get("cpu_quota"), results.get("memory_quota_bytes")
    cpu, memory = (
        _ratio(results.get("cpu_seconds"), cpu_quota),
        _ratio(results.get("memory_bytes"), memory_quota),
    )
    return NodeMetrics(
        cpu=_optional_metric_value(cpu, at),
        cpu_quota=cpu_quota or None,
        memory=_optional_metric_value(memory, at),
        memory_growth=_ratio(results.get(_MEMORY_GROWTH_QUERY), memory_quota) or 0.0,
        pd_failures=_optional_metric_value(_failure_ratio_of(results, "pd"), at),
        tikv_failures=_optional_metric_value(_failure_ratio_of(results, "tikv"), at),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _failure_ratio_of(results: Mapping[str, float], component: str) -> float | None:
    failures, requests = results.get(f"{component}_failures"), results.get(f"{component}_requests")
    return failure_ratio(failures, requests) if failures is not None and requests is not None else None


def _optional_metric_value(value: float | None, at: float) -> MetricValue | None:
    return metric_value(value, at) if value is not None else None


def _build_selector(name: str, labels: Mapping[str, str], type_label: str) -> str:
    pairs = {**labels, **({"type": type_label} if type_label else {})}
    # JSON's escapes are among PromQL's (prometheus.io/docs/prometheus/latest/querying/basics).
    matchers = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in pairs.items())
    return f"{name}{{{matchers}}}"
