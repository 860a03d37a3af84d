"""What a Prometheus is asked for, and what its answers tell of each node. Pure.

One query a series gives it for all nodes (prometheus.io/docs/prometheus/latest/querying/api).
How old the newest sample is, is asked too, by Prometheus's own clock, from which ours may differ.
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
"""What tells TiDB's series from those of others: TiUP sets the one, TiDB Operator the other."""

AGE_QUERY = "age"
_MEMORY_GROWTH_QUERY = "growth"


class InvalidPrometheusResponse(Exception):
    """An answer that Prometheus does not give; the text says what it is, to follow the URL."""


def build_queries(labels: Mapping[str, str], instance_label: str) -> dict[str, str]:
    """PromQL by name: for each part of a `Sample`, for the growth of memory, for how old all that is."""
    selected = {
        series.field: _build_selector(series.name, labels, series.type_label) for series in TIDB_SERIES
    }
    queries_by_name = {AGE_QUERY: f"time() - timestamp({selected['cpu_seconds']})"}
    for field, selector in selected.items():
        if field == "cpu_seconds":
            # By the last two samples, as in TiProxy; TiUP's Prometheus takes one every 15 s. `rate` divides
            # by the whole range, which makes a node that has just come look idle.
            queries_by_name[field] = f"irate({selector}[2m])"
        elif field.startswith(("pd_", "tikv_")):
            queries_by_name[field] = f"sum by ({instance_label}) (increase({selector}[2m]))"
        else:
            queries_by_name[field] = selector
    queries_by_name[_MEMORY_GROWTH_QUERY] = f"deriv({selected['memory_bytes']}[1m])"
    return queries_by_name


def parse_values(body: bytes, instance_label: str) -> dict[str, float]:
    """The values of an answer by what its label names. Unreadable.

    What several series name alike is left out: they are of different nodes. So is what is no finite number.
    """
    try:
        document = json.loads(body)
        result = document["data"]["result"] if document["data"]["resultType"] == "vector" else None
        named_values = [(one["metric"].get(instance_label), float(one["value"][1])) for one in result or ()]
        occurrences = Counter(name for name, _ in named_values)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise InvalidPrometheusResponse("answers, but not as Prometheus does") from None
    if result is None:
        raise InvalidPrometheusResponse("answers, but not as Prometheus does")
    return {
        name: value
        for name, value in named_values
        if isinstance(name, str) and occurrences[name] == 1 and math.isfinite(value)
    }


def node_metrics_by_name(answers: Mapping[str, Mapping[str, float]], now: float) -> dict[str, NodeMetrics]:
    """What they tell, by what names the node; `now`: our time when it told the age."""
    return {
        name: _build_node_metrics(
            {query: found[name] for query, found in answers.items() if name in found}, now - max(age, 0.0)
        )
        for name, age in answers[AGE_QUERY].items()
    }


def addresses_by_name(targets: Mapping[str, CheckTarget]) -> dict[str, str]:
    """The address of each node by all that may name it in a label; what names two of them names none.

    TiUP names nodes by host:port of their status port, TiDB Operator by their pod, with which their host
    begins (`basic-tidb-0.basic-tidb-peer.default.svc`).
    """
    candidates: dict[str, set[str]] = {}
    for address, target in targets.items():
        for name in _names_of(target):
            candidates.setdefault(name, set()).add(address)
    return {name: addresses_.pop() for name, addresses_ in candidates.items() if len(addresses_) == 1}


def _names_of(target: CheckTarget) -> set[str]:
    found = set()
    if target.status_endpoint is not None:
        found |= {
            target.status_endpoint,
            addresses.join(target.status_host, addresses.split(target.status_endpoint)[1]),
        }
    for host in (target.status_host, addresses.split(target.address)[0]):
        found.add(host)
        if addresses.literal_ip(host) is None:
            found.add(host.partition(".")[0])
    return found - {""}


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
    shown = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in pairs.items())
    return f"{name}{{{shown}}}"
