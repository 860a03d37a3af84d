"""What an Envoy's metrics service stream says of Tidevoy's module. No I/O.

Protocol: envoyproxy/envoy api/envoy/service/metrics/v3/metrics_service.proto. What Envoy 1.40.0 was seen to
send, with `emit_tags_as_labels`:

* All its stats at every flush (`stats_flush_interval`), counters since its start, each as a family of its
  own: several families have one name and differ in their labels. A stat that was never set is not sent.
* The identifier, 60 kB of it, in the first message of a stream only.
* With `batch_size` a flush comes in several messages, so a message says nothing of what it leaves out. A
  stream begins with the first message of a flush.
* In a flush all counters come before the gauges, `module_info` among these.
* Each series has the time of its flush, by the Envoy's clock. What waited in a socket while we hung is known
  by it to be old. A clock that is put back makes what it tells seem old, for a minute at most.
* Names and values of labels as the module gave them: colons, brackets, line breaks, empty ones.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from controlplane.model.traffic import EJECT_REASONS, Census, Ejection, ModuleReport, Parts, Traffic
from controlplane.observe.clock_offset import PeerClock
from controlplane.observe.envoy_reports import counters
from controlplane.observe.envoy_reports.counters import FAMILIES, PLACES, Row, Tally
from controlplane.observe.envoy_reports.series_cache import Recall
from controlplane.observe.envoy_reports.telemetry_pb2 import (
    LabelPair,
    MetricFamily,
    StreamMetricsMessage,
    Value,
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


class Series(NamedTuple):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: int
    family: bytes = b""  # as it came, if it came alone


@dataclass(slots=True)
class Reading:
    """What a message holds of the series that were looked for. `unreadable` counts what could not be read."""

    envoy: str = ""  # empty in all but the first message
    series: list[Series] = field(default_factory=list)
    unreadable: int = 0
    flushed: float = 0.0  # when, in Unix time by the Envoy's clock; 0: it does not tell


def read(data: bytes, prefix: str = _PREFIX) -> Reading:
    """The series of a message whose names begin with `prefix`. What is malformed is counted, never raised."""
    try:
        message = StreamMetricsMessage.FromString(data)
        return Reading(message.identifier.node.id, *_series(message.envoy_metrics, prefix))
    except DecodeError:
        return Reading(unreadable=1)


def _series(families: Iterable[bytes], prefix: str) -> tuple[list[Series], int]:
    """Those whose names begin with `prefix`, and how many families could not be read."""
    series: list[Series] = []
    unreadable = 0
    mark = prefix.encode()
    parsed: dict[bytes, tuple[str, str]] = {}
    for serialised in families:
        # Hundreds of Envoy's own families come along; parsing them for their names costs five times as much.
        if mark not in serialised:
            continue
        try:
            family = MetricFamily.FromString(serialised)
            if not family.name.startswith(prefix):
                continue
            metrics = family.metric[:]  # a slice is twice as quick to walk as the container
            alone = serialised if len(metrics) == 1 else b""
            for metric in metrics:
                labels = dict([parsed.get(pair) or _label(pair, parsed) for pair in metric.label[:]])
                series.append(Series(family.name, labels, _value(metric), alone))
        except (DecodeError, ValueError):
            unreadable += 1
    return series, unreadable


def _flushed(families: Sequence[bytes]) -> float:
    """When a message was made; all that is in it tells the same."""
    try:
        metrics = MetricFamily.FromString(families[0]).metric if families else ()
        return float(metrics[0].timestamp_ms / 1000) if metrics else 0.0
    except DecodeError:
        return 0.0


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

    def __init__(
        self, known: Callable[[], Set[str]], recall: Recall | None = None, *, joined: str = ""
    ) -> None:
        """`known` gives the addresses of the nodes there are; what is said of others is left out.

        `recall` knows what other streams have told. `joined` is the Envoy of a stream whose beginning was
        missed: nothing is told of it before a whole flush has come.
        """
        self.envoy = joined  # known from the first message on; empty after it: it did not say
        self.at = 0.0
        """When its latest message was made, by our clock."""
        self._known = known
        self._latest_known: Set[str] = frozenset()
        self._recall = recall or Recall()
        self._version = self._instance = ""
        self._tally = Tally()
        self._refusals: dict[tuple[str, str], int] = {}
        self._ejected_since: dict[tuple[str, str], int] = {}  # by node and reason
        self._dropped = 0
        self._flushes = _Flushes()
        self._envoys_clock = PeerClock()
        self._is_timed = False  # whether the Envoy's messages say when they were made
        self._has_reported = False
        self._lacks_part = bool(joined)
        self._marked = False
        self._unclear: set[str] = set()
        self._has_served = False
        self._began: float | None = None
        self._past: deque[tuple[float, Mapping[str, Row]]] = deque(maxlen=2)

    def feed(self, data: bytes, at: float) -> ModuleReport | None:
        """Take in a message that has come now; all that is known after it, once a flush.

        That is with `module_info`, behind all counters of the flush. What comes behind it is told with the
        next one: a report of all nodes for each of many messages would cost more than all that they hold.
        """
        known = self._known()
        if known is not self._latest_known:
            self._latest_known = known
            self._tally.keep(known | {_NO_NODE})
        reading = self._read(data)
        self.envoy = self.envoy or reading.envoy
        if reading.flushed:
            self._envoys_clock.hear(reading.flushed, at)
            self._is_timed = True
            at = self._envoys_clock.here(reading.flushed)
        self.at = at
        self._dropped += reading.unreadable
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
        if self._lacks_part:
            # What came before may be the end of a flush; all that follows is whole.
            self._lacks_part, self._flushes = False, _Flushes()
            return None
        is_first, self._has_reported = not self._has_reported, True
        return self._report(at, is_first=is_first)

    def _read(self, data: bytes) -> Reading:
        """What is not known again."""
        try:
            message = StreamMetricsMessage.FromString(data)
        except DecodeError:
            return Reading(unreadable=1)
        rest = self._recall.take(message.envoy_metrics[:], self._tally)
        return Reading(message.identifier.node.id, *_series(rest, _PREFIX), _flushed(message.envoy_metrics))

    def _take(self, series: Series, known: Set[str]) -> bool:
        """Whether the series could be used. A name that is not ours to know is no failure."""
        name, labels = series.name.removeprefix(_PREFIX), series.labels
        family = FAMILIES.get(name)
        if family is None:
            return self._take_words(name, series)
        self._has_served = True
        node, word = labels.get("node", _NO_NODE), labels.get(family.label, "")
        if family.also:
            word = f"{word}/{labels.get(family.also, '')}"
        place = PLACES.get((name, word))
        if place is None or (node != _NO_NODE and node not in known):
            if name == "sessions" and series.value:
                self._unclear.add(node)  # of a module that knows more states, there are sessions left out
            return False
        self._tally.note(node, place, series.value)
        self._recall.learn(series.family, series.value, node, place)
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
        elif name == "ejected_since":
            return self._take_ejection(labels.get("node", _NO_NODE), labels.get("reason", ""), series.value)
        return True

    def _take_ejection(self, node: str, reason: str, since: int) -> bool:
        if not since:
            self._ejected_since.pop((node, reason), None)
        elif node not in self._latest_known or reason not in EJECT_REASONS:
            return False
        else:
            self._ejected_since[node, reason] = since
        return True

    def _report(self, at: float, *, is_first: bool) -> ModuleReport:
        rows = self._tally.all()
        then = self._baseline(rows, at)

        def traffic(node: str, told: Row) -> Traffic:
            return counters.traffic(told, then.get(node))

        return ModuleReport(
            envoy=self.envoy,
            at=at,
            version=self._version,
            instance=self._instance,
            nodes=Parts(rows, traffic, self._tally.moves()),
            refusals=MappingProxyType(dict(self._refusals)),
            ejections=self._ejections(),
            dropped=self._dropped,
            census=self._census(at),
            is_first=is_first,
        )

    def _ejections(self) -> Mapping[str, Ejection]:
        """The latest ejection of each node, with times of our clock."""
        oldest_first = sorted(self._ejected_since.items(), key=lambda item: item[1])
        our_time = self._envoys_clock.here if self._is_timed else float
        return MappingProxyType(
            {
                node: Ejection(self.envoy, reason, round(our_time(since)))
                for (node, reason), since in oldest_first
                if node in self._latest_known
            }
        )

    def _census(self, at: float) -> Census | None:
        began = self._flushes.began
        if began is None:
            return None
        there = MappingProxyType(self._tally.sessions())
        return Census(at, began, there, self._flushes.covered, self._has_served, self._instance)

    def _baseline(self, rows: Mapping[str, Row], at: float) -> Mapping[str, Row]:
        """The latencies of one to two windows ago, at first those of the stream's first flush."""
        if not self._past:
            self._began = at if self._began is None else self._began
            if at - self._began < _FLUSH:
                return counters.latency(rows)
        if not self._past or at - self._past[-1][0] >= _WINDOW:
            self._past.append((at, counters.latency(rows)))
        return self._past[0][1]
