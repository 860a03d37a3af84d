"""What an Envoy's metrics service stream says of Tidevoy's module. No I/O.

Protocol: envoyproxy/envoy api/envoy/service/metrics/v3/metrics_service.proto. What Envoy 1.40.0 was seen to
send, with `emit_tags_as_labels`:

* All its stats at every flush (`stats_flush_interval`), counters since its start, each as a family of its
  own: several families have one name and differ in their labels. A stat that was never set is not sent.
* The identifier, 60 kB of it, in the first message of a stream only.
* With `batch_size` a flush comes in several messages, so a message says nothing of what it leaves out. A
  stream begins with the first message of a flush.
* In a flush all counters come before the gauges, `module_info` among these.
* Names and values of labels as the module gave them: colons, brackets, line breaks, empty ones.
"""

from __future__ import annotations

import re
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
    MOVES,
    NO_BUCKETS,
    PIN_REASONS,
    STATES,
    Census,
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
_FLUSH = 1.0  # seconds within which the batches of one flush arrive
_INSTANCE = re.compile(r"[0-9a-f]{16}")
_BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
_MOVES = {f"{result}/{why}": (result, why) for result, why in MOVES}


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family is counted: the label beside `node`, and the values that it may have.

    With a second label (`also`) a word is both values with a slash between them.
    """

    label: str = ""
    words: Set[str] = frozenset(("",))
    also: str = ""


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
    "migrations": _Family("result", frozenset(_MOVES), also="reason"),
    "migration_seconds_bucket": _Family("le", frozenset(_BUCKETS)),
    "migration_microseconds": _Family(),
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


class _Flushes:
    """Tells when a stream has told all that there is to tell, and of which nodes.

    Nothing says where a flush ends. But each has `module_info` once, so all series have come between its
    second time and the first, or at most the time of a flush before that. Nodes that were clear all the
    while, and one flush longer, were not left out of it.
    """

    def __init__(self) -> None:
        self.began: float | None = None  # no value is older; None: not all gauges have come yet
        self.covered: Set[str] = frozenset()
        self._marked: float | None = None
        self._clear: Set[str] | None = None  # nodes that were so since the latest mark
        self._clear_before: Set[str] = frozenset()  # and between that one and the one before it

    def message(self, at: float, clear: Set[str], *, marked: bool) -> None:
        """A message came. `clear`: nodes of which it left nothing out; `marked`: it had `module_info`."""
        self._clear = clear if self._clear is None else _both(self._clear, clear)
        self.covered = _both(self.covered, clear)
        if not marked:
            return
        if self._marked is not None:
            self.began = self._marked - _FLUSH
            self.covered = _both(self._clear_before, self._clear)
        self._marked, self._clear, self._clear_before = at, clear, self._clear


def _both(one: Set[str], other: Set[str]) -> Set[str]:
    return one if one is other else one & other  # nearly always the same set, of thousands


class TelemetryStream:
    """What one stream has told so far. A new stream begins anew, so an Envoy's restart needs no detecting."""

    def __init__(self, known: Callable[[], Set[str]]) -> None:
        """`known` gives the addresses of the nodes there are; what is said of others is left out."""
        self.envoy = ""  # known from the first message on; empty after it: it did not say
        self._known = known
        self._version = self._instance = ""
        self._nodes: dict[str, dict[str, dict[str, int]]] = {}  # node -> family -> word -> value
        self._refusals: dict[tuple[str, str], int] = {}
        self._dropped = 0
        self._flushes = _Flushes()
        self._has_reported = False
        self._marked = False
        self._unclear: set[str] = set()
        self._has_served = False
        self._began: float | None = None
        self._past: deque[tuple[float, Mapping[str, tuple[int, ...]]]] = deque(maxlen=2)

    def feed(self, data: bytes, at: float) -> ModuleReport | None:
        """Take in a message; all that is known after it, once a flush.

        That is with `module_info`, behind all counters of the flush. What comes behind it is told with the
        next one: a report of all nodes for each of many messages would cost more than all that they hold.
        """
        reading = read(data)
        self.envoy = self.envoy or reading.envoy
        self._dropped += reading.unreadable
        known = self._known()
        self._marked = False
        self._unclear.clear()
        for series in reading.series:
            if not self._take(series, known):
                self._dropped += 1
        if reading.unreadable:
            self._flushes = _Flushes()  # it may have been sessions
        else:
            self._flushes.message(at, known - self._unclear if self._unclear else known, marked=self._marked)
        if not self._marked:
            return None
        for node in self._nodes.keys() - known - {_NO_NODE}:
            del self._nodes[node]
        is_first, self._has_reported = not self._has_reported, True
        return self._report(at, is_first=is_first)

    def _take(self, series: Series, known: Set[str]) -> bool:
        """Whether the series could be used. A name that is not ours to know is no failure."""
        name, labels = series.name.removeprefix(_PREFIX), series.labels
        family = _FAMILIES.get(name)
        if family is None:
            return self._take_words(name, series)
        self._has_served = True
        node, word = labels.get("node", _NO_NODE), labels.get(family.label, "")
        if family.also:
            word = f"{word}/{labels.get(family.also, '')}"
        if word not in family.words or (node != _NO_NODE and node not in known):
            if name == "sessions" and series.value:
                self._unclear.add(node)  # of a module that knows more states, there are sessions left out
            return False
        self._nodes.setdefault(node, {}).setdefault(name, {})[word] = series.value
        return True

    def _take_words(self, name: str, series: Series) -> bool:
        labels = series.labels
        if name == "module_info":
            self._marked = True
            self._version = labels.get("version", "")[:_LONGEST_WORD]
            instance = labels.get("instance", "")
            self._instance = instance if _INSTANCE.fullmatch(instance) else ""
        elif name == "config_refusals" and series.value:
            refusal = labels.get("extension", "")[:_LONGEST_WORD], labels.get("text", "")[:_LONGEST_TEXT]
            if refusal not in self._refusals and len(self._refusals) >= _MOST_REFUSALS:
                return False
            self._refusals[refusal] = series.value
        return True

    def _report(self, at: float, *, is_first: bool) -> ModuleReport:
        buckets = {node: _buckets(families, "command_seconds") for node, families in self._nodes.items()}
        then = self._baseline(buckets, at)
        nodes = {
            node: _traffic(families, buckets[node], then.get(node, NO_BUCKETS))
            for node, families in self._nodes.items()
        }
        return ModuleReport(
            envoy=self.envoy,
            at=at,
            version=self._version,
            instance=self._instance,
            nodes=MappingProxyType(nodes),
            refusals=MappingProxyType(dict(self._refusals)),
            dropped=self._dropped,
            census=self._census(nodes, at),
            is_first=is_first,
        )

    def _census(self, nodes: Mapping[str, Traffic], at: float) -> Census | None:
        began = self._flushes.began
        if began is None:
            return None
        sessions = {node: sum(part.sessions.values()) for node, part in nodes.items() if node != _NO_NODE}
        there = {node: count for node, count in sessions.items() if count}
        return Census(
            at, began, MappingProxyType(there), self._flushes.covered, self._has_served, self._instance
        )

    def _baseline(self, buckets: Mapping[str, tuple[int, ...]], at: float) -> Mapping[str, tuple[int, ...]]:
        """The buckets of one to two windows ago, at first those of the stream's first flush."""
        if not self._past:
            self._began = at if self._began is None else self._began
            if at - self._began < _FLUSH:
                return buckets
            self._past.append((at, buckets))
        elif at - self._past[-1][0] >= _WINDOW:
            self._past.append((at, buckets))
        return self._past[0][1]


def _buckets(families: Mapping[str, Mapping[str, int]], name: str) -> tuple[int, ...]:
    """Cumulative counts. Envoy reads one counter after the other, so a later one may lag: it never may."""
    counts = families.get(f"{name}_bucket")
    if counts is None:
        return NO_BUCKETS
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
        moves=MappingProxyType(
            {_MOVES[word]: count for word, count in families.get("migrations", {}).items()}
        ),
        move_buckets=_buckets(families, "migration_seconds"),
        move_seconds=counts("migration_microseconds").get("", 0) / 1e6,
    )
