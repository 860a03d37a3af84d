"""What an Envoy's metrics service stream says of Tidevoy's module. No I/O.

Protocol: envoyproxy/envoy api/envoy/service/metrics/v3/metrics_service.proto. What Envoy 1.40.0 was seen to
send, with `emit_tags_as_labels`:

* All its stats at every flush (`stats_flush_interval`), counters since its start, each as a family of its
  own: several families have one name and differ in their labels. A stat that was never set is not sent.
* The identifier, 60 kB of it, in the first message of a stream only.
* With `batch_size` a flush comes in several messages, so a message says nothing of what it leaves out.
* Names and values of labels as the module gave them: colons, brackets, line breaks, empty ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from controlplane.observe.telemetry_pb2 import LabelPair, MetricFamily, StreamMetricsMessage, Value
from controlplane.traffic import (
    BOUNDS,
    COMMANDS,
    CONNECT_FAILURES,
    DIRECTIONS,
    ERRORS,
    LOGIN_FAILURES,
    NO_BUCKETS,
    PIN_REASONS,
    STATES,
    ModuleReport,
    Traffic,
)

_PREFIX = "tidevoy."
_NO_NODE = ""
_LARGEST = 2.0**63
_LONGEST_TEXT = 500  # characters of a refusal that are kept
_LONGEST_WORD = 64  # characters of a version or an extension's name that are kept
_MOST_REFUSALS = 16
_WINDOW = 60.0  # seconds; what is "recent" is between one and two of these old
_FIRST_FLUSH = 1.0  # seconds within which the batches of one flush arrive
_BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family is counted: the label beside `node`, and the values that it may have."""

    label: str = ""
    words: Set[str] = frozenset(("",))


_FAMILIES: Mapping[str, _Family] = {
    "sessions": _Family("state", frozenset(STATES)),
    "sessions_pinned": _Family("reason", frozenset(PIN_REASONS)),
    "logins": _Family(),
    "login_failures": _Family("reason", frozenset(LOGIN_FAILURES)),
    "connect_failures": _Family("reason", frozenset(CONNECT_FAILURES)),
    "commands": _Family("kind", frozenset(COMMANDS)),
    "command_seconds_bucket": _Family("le", frozenset(_BUCKETS)),
    "command_microseconds": _Family(),
    "errors": _Family("class", frozenset(ERRORS)),
    "bytes": _Family("direction", frozenset(DIRECTIONS)),
}


class Series(NamedTuple):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: int


@dataclass(slots=True)
class Reading:
    """What a message holds of the series that were looked for. `unreadable` counts what could not be read."""

    envoy: str = ""  # empty in all but the first message
    series: list[Series] = field(default_factory=list)
    unreadable: int = 0


def read(data: bytes, prefix: str = _PREFIX) -> Reading:
    """The series of a message whose names begin with `prefix`. What is malformed is counted, never raised."""
    reading = Reading()
    try:
        message = StreamMetricsMessage.FromString(data)
        reading.envoy = message.identifier.node.id
    except DecodeError:
        reading.unreadable = 1
        return reading
    mark = prefix.encode()
    parsed: dict[bytes, tuple[str, str]] = {}
    for serialised in message.envoy_metrics:
        # Hundreds of Envoy's own families come along; parsing them for their names costs five times as much.
        if mark not in serialised:
            continue
        try:
            family = MetricFamily.FromString(serialised)
            if not family.name.startswith(prefix):
                continue
            for metric in family.metric[:]:  # a slice is twice as quick to walk as the container
                labels = dict([parsed.get(pair) or _label(pair, parsed) for pair in metric.label[:]])
                reading.series.append(Series(family.name, labels, _value(metric)))
        except (DecodeError, ValueError):
            reading.unreadable += 1
    return reading


def _label(pair: bytes, parsed: dict[bytes, tuple[str, str]]) -> tuple[str, str]:
    label = LabelPair.FromString(pair)
    parsed[pair] = label.name, label.value
    return parsed[pair]


def _value(metric: Any) -> int:
    """ValueError when it is no number of ours."""
    value = Value.FromString(metric.counter or metric.gauge).value
    if not 0 <= value < _LARGEST:  # which NaN is not either
        raise ValueError
    return int(value)


class TelemetryStream:
    """What one stream has told so far. A new stream begins anew, so an Envoy's restart needs no detecting."""

    def __init__(self, known: Callable[[], Set[str]]) -> None:
        """`known` gives the addresses of the nodes there are; what is said of others is left out."""
        self.envoy = ""  # known from the first message on; empty after it: it did not say
        self._known = known
        self._heard = False
        self._version = ""
        self._nodes: dict[str, dict[str, dict[str, int]]] = {}  # node -> family -> word -> value
        self._refusals: dict[tuple[str, str], int] = {}
        self._dropped = 0
        self._began: float | None = None
        self._past: deque[tuple[float, Mapping[str, tuple[int, ...]]]] = deque(maxlen=2)

    def feed(self, data: bytes, at: float) -> ModuleReport | None:
        """Take in a message; all that is known after it, or None while the Envoy has told of no module."""
        reading = read(data)
        self.envoy = self.envoy or reading.envoy
        self._dropped += reading.unreadable
        known = self._known()
        for node in self._nodes.keys() - known - {_NO_NODE}:
            del self._nodes[node]
        for series in reading.series:
            if not self._take(series, known):
                self._dropped += 1
        return self._report(at) if self._heard else None

    def _take(self, series: Series, known: Set[str]) -> bool:
        """Whether the series could be used. A name that is not ours to know is no failure."""
        name, labels = series.name.removeprefix(_PREFIX), series.labels
        family = _FAMILIES.get(name)
        if family is None:
            return self._take_words(name, series)
        self._heard = True
        node, word = labels.get("node", _NO_NODE), labels.get(family.label, "")
        if word not in family.words or (node != _NO_NODE and node not in known):
            return False
        self._nodes.setdefault(node, {}).setdefault(name, {})[word] = series.value
        return True

    def _take_words(self, name: str, series: Series) -> bool:
        labels = series.labels
        if name == "module_info":
            self._heard = True
            self._version = labels.get("version", "")[:_LONGEST_WORD]
        elif name == "config_refusals" and series.value:
            self._heard = True
            refusal = labels.get("extension", "")[:_LONGEST_WORD], labels.get("text", "")[:_LONGEST_TEXT]
            if refusal not in self._refusals and len(self._refusals) >= _MOST_REFUSALS:
                return False
            self._refusals[refusal] = series.value
        return True

    def _report(self, at: float) -> ModuleReport:
        buckets = {node: _buckets(families) for node, families in self._nodes.items()}
        then = self._baseline(buckets, at)
        nodes = {
            node: _traffic(families, buckets[node], then.get(node, NO_BUCKETS))
            for node, families in self._nodes.items()
        }
        return ModuleReport(
            envoy=self.envoy,
            at=at,
            version=self._version,
            nodes=MappingProxyType(nodes),
            refusals=MappingProxyType(dict(self._refusals)),
            dropped=self._dropped,
        )

    def _baseline(self, buckets: Mapping[str, tuple[int, ...]], at: float) -> Mapping[str, tuple[int, ...]]:
        """The buckets of one to two windows ago, at first those of the stream's first flush."""
        if not self._past:
            self._began = at if self._began is None else self._began
            if at - self._began < _FIRST_FLUSH:
                return buckets
            self._past.append((at, buckets))
        elif at - self._past[-1][0] >= _WINDOW:
            self._past.append((at, buckets))
        return self._past[0][1]


def _buckets(families: Mapping[str, Mapping[str, int]]) -> tuple[int, ...]:
    """Cumulative counts. Envoy reads one counter after the other, so a later one may lag: it never may."""
    counts = families.get("command_seconds_bucket", {})
    cumulative, most = [], 0
    for bound in _BUCKETS:
        most = max(most, counts.get(bound, 0))
        cumulative.append(most)
    return tuple(cumulative)


def _traffic(
    families: Mapping[str, Mapping[str, int]], now: tuple[int, ...], then: tuple[int, ...]
) -> Traffic:
    def counts(name: str) -> Mapping[str, int]:
        return MappingProxyType(dict(families.get(name, {})))

    return Traffic(
        sessions=counts("sessions"),
        pinned=counts("sessions_pinned"),
        logins=counts("logins").get("", 0),
        login_failures=counts("login_failures"),
        connect_failures=counts("connect_failures"),
        commands=counts("commands"),
        buckets=now,
        seconds=counts("command_microseconds").get("", 0) / 1e6,
        recent=tuple(max(0, late - early) for late, early in zip(now, then, strict=True)),
        errors=counts("errors"),
        bytes=counts("bytes"),
    )
