"""Builds the PromQL queries for node metrics and parses the responses. No I/O.

There is one query per series, for all nodes (prometheus.io/docs/prometheus/latest/querying/api). A further
query returns the age of each node's newest sample, because Prometheus's clock may differ from ours.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from controlplane import address as addresses
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics.exposition_parser import TIDB_SERIES

DEFAULT_LABEL_SETS: tuple[Mapping[str, str], ...] = ({"job": "tidb"}, {"component": "tidb"})
"""Labels that select TiDB's series: TiUP sets the first, TiDB Operator the second."""

AGE_QUERY = "age"


class InstantVector(NamedTuple):
    """The response to a query: the finite values by instance label, and the time of the evaluation.

    The time is by Prometheus's clock; None: there are no values.
    """

    values: Mapping[str, float]
    evaluated_at: float | None


def build_queries(labels: Mapping[str, str], instance_label: str) -> dict[str, str]:
    """Return the PromQL queries by name: the fields of `CounterSample`, and AGE_QUERY."""
    selectors = {
        series.field: _build_selector(series.name, labels, series.type_label) for series in TIDB_SERIES
    }
    # Without a sum, so that two nodes with the same name give two values.
    age = f"time() - timestamp({selectors['cpu_seconds']})"
    return {AGE_QUERY: age} | {
        field: f"sum by ({instance_label}) ({selector})" for field, selector in selectors.items()
    }


def parse_vector(body: bytes, instance_label: str) -> InstantVector:
    """Parse the response to a query. Raises ValueError if Prometheus never sends such a response.

    Drops values that are not finite, and all values of a name that several series (nodes) share.
    """
    try:
        data = json.loads(body)["data"]
        if data["resultType"] != "vector":
            raise ValueError
        entries = [
            (entry["metric"].get(instance_label), float(entry["value"][0]), float(entry["value"][1]))
            for entry in data["result"]
        ]
        occurrences = Counter(name for name, _, _ in entries)
        values = {
            name: value
            for name, _, value in entries
            if isinstance(name, str) and occurrences[name] == 1 and math.isfinite(value)
        }
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("not an instant vector") from error
    return InstantVector(values, entries[0][1] if entries else None)


def addresses_by_name(targets: Mapping[str, CheckTarget]) -> dict[str, str]:
    """Return node addresses by their possible names in the instance label, except for ambiguous names.

    The label is `host:port` of the status port (TiUP), or the pod (TiDB Operator). The pod is the first part
    of the host name, such as `basic-tidb-0` in `basic-tidb-0.basic-tidb-peer.default.svc`.
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


def _build_selector(name: str, labels: Mapping[str, str], type_label: str) -> str:
    pairs = {**labels, **({"type": type_label} if type_label else {})}
    # PromQL knows all escapes of JSON (prometheus.io/docs/prometheus/latest/querying/basics).
    matchers = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in pairs.items())
    return f"{name}{{{matchers}}}"
