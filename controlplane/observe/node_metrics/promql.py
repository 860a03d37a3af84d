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
from controlplane.model.node_metrics import Reading, Vitals
from controlplane.observe.health.health_checker import Target
from controlplane.observe.node_metrics.exposition_parser import SERIES
from controlplane.observe.node_metrics.rates import failure_ratio, reading

USUAL_LABELS: tuple[Mapping[str, str], ...] = ({"job": "tidb"}, {"component": "tidb"})
"""What tells TiDB's series from those of others: TiUP sets the one, TiDB Operator the other."""

AGE = "age"
_GROWTH = "growth"


class Unreadable(Exception):
    """An answer that Prometheus does not give; the text says what it is, to follow the URL."""


def queries(labels: Mapping[str, str], instance_label: str) -> dict[str, str]:
    """PromQL by name: for each part of a `Sample`, for the growth of memory, for how old all that is."""
    selected = {series.part: _selector(series.name, labels, series.kind) for series in SERIES}
    asked = {AGE: f"time() - timestamp({selected['cpu_seconds']})"}
    for part, selector in selected.items():
        if part == "cpu_seconds":
            # By the last two samples, as in TiProxy; TiUP's Prometheus takes one every 15 s. `rate` divides
            # by the whole range, which makes a node that has just come look idle.
            asked[part] = f"irate({selector}[2m])"
        elif part.startswith(("pd_", "tikv_")):
            asked[part] = f"sum by ({instance_label}) (increase({selector}[2m]))"
        else:
            asked[part] = selector
    asked[_GROWTH] = f"deriv({selected['memory_bytes']}[1m])"
    return asked


def values(body: bytes, instance_label: str) -> dict[str, float]:
    """The values of an answer by what its label names. Unreadable.

    What several series name alike is left out: they are of different nodes. So is what is no finite number.
    """
    try:
        told = json.loads(body)
        result = told["data"]["result"] if told["data"]["resultType"] == "vector" else None
        named = [(one["metric"].get(instance_label), float(one["value"][1])) for one in result or ()]
        times = Counter(name for name, _ in named)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise Unreadable("answers, but not as Prometheus does") from None
    if result is None:
        raise Unreadable("answers, but not as Prometheus does")
    return {
        name: value
        for name, value in named
        if isinstance(name, str) and times[name] == 1 and math.isfinite(value)
    }


def vitals(answers: Mapping[str, Mapping[str, float]], now: float) -> dict[str, Vitals]:
    """What they tell, by what names the node; `now`: our time when it told the age."""
    return {
        name: _vitals_of(
            {query: found[name] for query, found in answers.items() if name in found}, now - max(age, 0.0)
        )
        for name, age in answers[AGE].items()
    }


def names(targets: Mapping[str, Target]) -> dict[str, str]:
    """The address of each node by all that may name it in a label; what names two of them names none.

    TiUP names nodes by host:port of their status port, TiDB Operator by their pod, with which their host
    begins (`basic-tidb-0.basic-tidb-peer.default.svc`).
    """
    of: dict[str, set[str]] = {}
    for address, target in targets.items():
        for name in _names(target):
            of.setdefault(name, set()).add(address)
    return {name: addresses_.pop() for name, addresses_ in of.items() if len(addresses_) == 1}


def _names(target: Target) -> set[str]:
    found = set()
    if target.status is not None:
        found |= {target.status, addresses.join(target.status_host, addresses.split(target.status)[1])}
    for host in (target.status_host, addresses.split(target.address)[0]):
        found.add(host)
        if addresses.literal_ip(host) is None:
            found.add(host.partition(".")[0])
    return found - {""}


def _vitals_of(told: Mapping[str, float], at: float) -> Vitals:
    cpu_quota, memory_quota = told.get("cpu_quota"), told.get("memory_quota_bytes")
    cpu, memory = _ratio(told.get("cpu_seconds"), cpu_quota), _ratio(told.get("memory_bytes"), memory_quota)
    return Vitals(
        cpu=_reading(cpu, at),
        cpu_quota=cpu_quota or None,
        memory=_reading(memory, at),
        memory_growth=_ratio(told.get(_GROWTH), memory_quota) or 0.0,
        pd_failures=_reading(_failures(told, "pd"), at),
        tikv_failures=_reading(_failures(told, "tikv"), at),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _failures(told: Mapping[str, float], of: str) -> float | None:
    failures, requests = told.get(f"{of}_failures"), told.get(f"{of}_requests")
    return failure_ratio(failures, requests) if failures is not None and requests is not None else None


def _reading(value: float | None, at: float) -> Reading | None:
    return reading(value, at) if value is not None else None


def _selector(name: str, labels: Mapping[str, str], kind: str) -> str:
    pairs = {**labels, **({"type": kind} if kind else {})}
    # JSON's escapes are among PromQL's (prometheus.io/docs/prometheus/latest/querying/basics).
    shown = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in pairs.items())
    return f"{name}{{{shown}}}"
