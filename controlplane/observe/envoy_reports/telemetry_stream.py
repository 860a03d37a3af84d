"""Parses an Envoy's metrics service stream into reports of Tidevoy's module. No I/O.

Protocol: envoyproxy/envoy api/envoy/service/metrics/v3/metrics_service.proto. Observed behavior of Envoy
1.40.0 with `emit_tags_as_labels`:

* Every flush (`stats_flush_interval`) contains all stats, and counters since the Envoy's start. Each series
  is a family of its own: several families have the same name and differ in their labels. A stat that was
  never set is not sent.
* Only the first message of a stream contains the identifier, which has 60 kB.
* With `batch_size`, a flush consists of several messages, so a series that is missing in a message proves
  nothing. A stream begins with the first message of a flush.
* In a flush, all counters come before the gauges, of which `module_info` is one.
* Each series has the timestamp of its flush, by the Envoy's clock. So a message that waited in a socket while
  this process was stalled is known to be old. If the Envoy's clock is set back, its messages look old for at
  most a minute.
* Label names and values arrive as the module set them: with colons, brackets, line breaks, or empty.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from controlplane.model.traffic import (
    EJECT_REASONS,
    Ejection,
    LazyTrafficByNode,
    ModuleReport,
    SessionCounts,
    Traffic,
)
from controlplane.observe.clock_offset import ClockOffset
from controlplane.observe.envoy_reports import counters
from controlplane.observe.envoy_reports.counters import COLUMNS, FAMILIES, CounterRow, NodeCounters
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_pb2 import (
    LabelPair,
    MetricFamily,
    StreamMetricsMessage,
    Value,
)

_METRIC_PREFIX = "tidevoy."
_NO_NODE = ""
_VALUE_LIMIT = 2.0**63
_MAX_REJECTION_CHARS = 500
_MAX_LABEL_CHARS = 64  # of the version and of extension names
_MAX_REJECTIONS = 16
_RECENT_WINDOW_SECONDS = 60.0  # "recent" values cover the last one to two windows
_FLUSH_SECONDS = 1.0  # time within which all batches of one flush arrive
_INSTANCE_PATTERN = re.compile(r"[0-9a-f]{16}")


class ModuleSeries(NamedTuple):
    """One series: name, labels, and value."""

    name: str
    labels: Mapping[str, str]
    value: int
    serialised_family: bytes = b""  # the bytes of its family, if it is the only series in it


@dataclass(slots=True)
class ParsedMessage:
    """The series of a message that have the prefix; `unreadable_count` counts families that are malformed."""

    envoy: str = ""  # empty in all but the first message
    series: list[ModuleSeries] = field(default_factory=list)
    unreadable_count: int = 0
    flushed_at: float = 0.0  # Unix time by the Envoy's clock; 0: unknown


def parse_message(data: bytes, prefix: str = _METRIC_PREFIX) -> ParsedMessage:
    """Parse the series of a message whose names begin with `prefix`; malformed families are only counted."""
    try:
        message = StreamMetricsMessage.FromString(data)
        return ParsedMessage(message.identifier.node.id, *_parse_families(message.envoy_metrics, prefix))
    except DecodeError:
        return ParsedMessage(unreadable_count=1)


def _parse_families(families: Iterable[bytes], prefix: str) -> tuple[list[ModuleSeries], int]:
    """Return the series whose names begin with `prefix`, and the number of unreadable families."""
    series: list[ModuleSeries] = []
    unreadable = 0
    encoded_prefix = prefix.encode()
    parsed_labels: dict[bytes, tuple[str, str]] = {}
    for serialised in families:
        # Hundreds of families are Envoy's own; parsing all of them for their names costs five times as much.
        if encoded_prefix not in serialised:
            continue
        try:
            family = MetricFamily.FromString(serialised)
            if not family.name.startswith(prefix):
                continue
            metrics = family.metric[:]  # iterating over a slice is twice as fast as over the container
            sole_family = serialised if len(metrics) == 1 else b""
            for metric in metrics:
                labels = dict(
                    [parsed_labels.get(pair) or _parse_label(pair, parsed_labels) for pair in metric.label[:]]
                )
                series.append(ModuleSeries(family.name, labels, _parse_value(metric), sole_family))
        except (DecodeError, ValueError):
            unreadable += 1
    return series, unreadable


def _parse_flush_time(families: Sequence[bytes]) -> float:
    """Return the flush time of a message from its first family; all have the same one."""
    try:
        metrics = MetricFamily.FromString(families[0]).metric if families else ()
        return float(metrics[0].timestamp_ms / 1000) if metrics else 0.0
    except DecodeError:
        return 0.0


def _parse_label(pair: bytes, parsed_labels: dict[bytes, tuple[str, str]]) -> tuple[str, str]:
    label = LabelPair.FromString(pair)
    parsed_labels[pair] = label.name, label.value
    return parsed_labels[pair]


def _parse_value(metric: Any) -> int:
    """Return the value. Raises ValueError if it is negative, too large or NaN."""
    value = Value.FromString(metric.counter or metric.gauge).value
    if not 0 <= value < _VALUE_LIMIT:  # also true for NaN
        raise ValueError
    return int(value)


class _FlushTracker:
    """Determines when a stream has delivered all series, and for which nodes.

    Nothing marks the end of a flush. But each flush contains `module_info` once, so between two of them all
    series have arrived, none earlier than the duration of a flush before the first one. Nodes that were
    complete all that time, and one flush longer, were complete in that flush.
    """

    def __init__(self) -> None:
        self.counting_since: float | None = None  # no value is older; None: not all gauges have arrived yet
        self.complete_nodes: Set[str] = frozenset()
        self._last_info_at: float | None = None
        self._complete_since_info: Set[str] | None = None  # nodes complete since the latest `module_info`
        self._complete_before_info: Set[str] = frozenset()  # nodes complete between it and the previous one

    def add_message(self, at: float, complete: Set[str], *, has_info: bool) -> None:
        """Record a message. `complete`: nodes without dropped sessions; `has_info`: it has `module_info`."""
        self._complete_since_info = (
            complete if self._complete_since_info is None else _intersect(self._complete_since_info, complete)
        )
        self.complete_nodes = _intersect(self.complete_nodes, complete)
        if not has_info:
            return
        if self._last_info_at is not None:
            self.counting_since = self._last_info_at - _FLUSH_SECONDS
            self.complete_nodes = _intersect(self._complete_before_info, self._complete_since_info)
        self._last_info_at, self._complete_since_info, self._complete_before_info = (
            at,
            complete,
            self._complete_since_info,
        )


def _intersect(one: Set[str], other: Set[str]) -> Set[str]:
    return one if one is other else one & other  # nearly always the same set, with thousands of nodes


class TelemetryStream:
    """The state of one stream. Every stream starts empty, so a restart of an Envoy needs no detection."""

    def __init__(
        self,
        known_nodes: Callable[[], Set[str]],
        series_cache: SeriesCache | None = None,
        *,
        resumed_envoy: str = "",
    ) -> None:
        """`known_nodes` returns the addresses of all nodes; series of others are dropped.

        `series_cache` may be shared with other streams. `resumed_envoy`: the Envoy of a stream whose
        beginning was missed; it is reported only after a complete flush.
        """
        self.envoy = resumed_envoy  # set by the first message; empty after it: the message had no id
        self.last_message_at = 0.0
        """When the latest message was made, by our clock."""
        self._known_nodes = known_nodes
        self._latest_known_nodes: Set[str] = frozenset()
        self._series_cache = series_cache or SeriesCache()
        self._version = self._instance = ""
        self._counters = NodeCounters()
        self._rejections: dict[tuple[str, str], int] = {}
        self._ejected_since: dict[tuple[str, str], int] = {}  # by node and reason
        self._dropped = 0
        self._flush_tracker = _FlushTracker()
        self._clock_offset = ClockOffset()
        self._has_timestamps = False  # whether the Envoy's messages have timestamps
        self._has_reported = False
        self._missed_start = bool(resumed_envoy)
        self._has_info = False
        self._incomplete_nodes: set[str] = set()
        self._has_served = False
        self._first_report_at: float | None = None
        self._latency_history: deque[tuple[float, Mapping[str, CounterRow]]] = deque(maxlen=2)

    def receive(self, data: bytes, at: float) -> ModuleReport | None:
        """Apply a message that arrived at that time; return a report once per flush, else None.

        The report is made at `module_info`, which follows all counters of the flush. Later series are in the
        next report: a report of all nodes after each of many messages would cost more than parsing them.
        """
        known_nodes = self._known_nodes()
        if known_nodes is not self._latest_known_nodes:
            self._latest_known_nodes = known_nodes
            self._counters.retain(known_nodes | {_NO_NODE})
        message = self._parse_unknown(data)
        self.envoy = self.envoy or message.envoy
        if message.flushed_at:
            self._clock_offset.observe(message.flushed_at, at)
            self._has_timestamps = True
            at = self._clock_offset.to_local(message.flushed_at)
        self.last_message_at = at
        self._dropped += message.unreadable_count
        self._has_info = False
        self._incomplete_nodes.clear()
        for series in message.series:
            if not self._apply_series(series, known_nodes):
                self._dropped += 1
        if message.unreadable_count:
            self._flush_tracker = _FlushTracker()  # the unreadable series may have been sessions
        else:
            self._flush_tracker.add_message(
                at,
                known_nodes - self._incomplete_nodes if self._incomplete_nodes else known_nodes,
                has_info=self._has_info,
            )
        if not self._has_info:
            return None
        if self._missed_start:
            # The messages before may be the end of a flush; all later flushes are complete.
            self._missed_start, self._flush_tracker = False, _FlushTracker()
            return None
        is_first, self._has_reported = not self._has_reported, True
        return self._build_report(at, is_first=is_first)

    def _parse_unknown(self, data: bytes) -> ParsedMessage:
        """Apply the cached series of a message and parse the others."""
        try:
            message = StreamMetricsMessage.FromString(data)
        except DecodeError:
            return ParsedMessage(unreadable_count=1)
        unknown_families = self._series_cache.apply_known(message.envoy_metrics[:], self._counters)
        return ParsedMessage(
            message.identifier.node.id,
            *_parse_families(unknown_families, _METRIC_PREFIX),
            _parse_flush_time(message.envoy_metrics),
        )

    def _apply_series(self, series: ModuleSeries, known_nodes: Set[str]) -> bool:
        """Apply a series; return whether it is valid. A series with an unknown name counts as valid."""
        name, labels = series.name.removeprefix(_METRIC_PREFIX), series.labels
        family = FAMILIES.get(name)
        if family is None:
            return self._read_info(name, series)
        self._has_served = True
        node, label_value = labels.get("node", _NO_NODE), labels.get(family.label, "")
        if family.second_label:
            label_value = f"{label_value}/{labels.get(family.second_label, '')}"
        column = COLUMNS.get((name, label_value))
        if column is None or (node != _NO_NODE and node not in known_nodes):
            if name == "sessions" and series.value:
                self._incomplete_nodes.add(node)  # a newer module has more states: sessions are missing
            return False
        self._counters.set_value(node, column, series.value)
        self._series_cache.add(series.serialised_family, series.value, node, column)
        return True

    def _read_info(self, name: str, series: ModuleSeries) -> bool:
        labels = series.labels
        if name == "module_info":
            self._has_info = True
            self._version = labels.get("version", "")[:_MAX_LABEL_CHARS]
            instance = labels.get("instance", "")
            self._instance = instance if _INSTANCE_PATTERN.fullmatch(instance) else ""
        elif name == "config_refusals" and series.value:
            rejection = (
                labels.get("extension", "")[:_MAX_LABEL_CHARS],
                labels.get("text", "")[:_MAX_REJECTION_CHARS],
            )
            if rejection not in self._rejections and len(self._rejections) >= _MAX_REJECTIONS:
                return False
            self._rejections[rejection] = series.value
        elif name == "ejected_since":
            return self._apply_ejection(labels.get("node", _NO_NODE), labels.get("reason", ""), series.value)
        return True

    def _apply_ejection(self, node: str, reason: str, since: int) -> bool:
        if not since:
            self._ejected_since.pop((node, reason), None)
        elif node not in self._latest_known_nodes or reason not in EJECT_REASONS:
            return False
        else:
            self._ejected_since[node, reason] = since
        return True

    def _build_report(self, at: float, *, is_first: bool) -> ModuleReport:
        rows = self._counters.snapshot()
        baseline = self._baseline(rows, at)

        def traffic(node: str, row: CounterRow) -> Traffic:
            return counters.build_traffic(row, baseline.get(node))

        return ModuleReport(
            envoy=self.envoy,
            at=at,
            version=self._version,
            instance=self._instance,
            nodes=LazyTrafficByNode(rows, traffic, self._counters.migrations()),
            rejections=MappingProxyType(dict(self._rejections)),
            ejections=self._ejections(),
            dropped_series=self._dropped,
            session_counts=self._session_counts(at),
            is_first=is_first,
        )

    def _ejections(self) -> Mapping[str, Ejection]:
        """Return the latest ejection of each node, with times by our clock."""
        oldest_first = sorted(self._ejected_since.items(), key=lambda item: item[1])
        to_local = self._clock_offset.to_local if self._has_timestamps else float
        return MappingProxyType(
            {
                node: Ejection(self.envoy, reason, round(to_local(since)))
                for (node, reason), since in oldest_first
                if node in self._latest_known_nodes
            }
        )

    def _session_counts(self, at: float) -> SessionCounts | None:
        counting_since = self._flush_tracker.counting_since
        if counting_since is None:
            return None
        sessions = MappingProxyType(self._counters.sessions())
        return SessionCounts(
            at, counting_since, sessions, self._flush_tracker.complete_nodes, self._has_served, self._instance
        )

    def _baseline(self, rows: Mapping[str, CounterRow], at: float) -> Mapping[str, CounterRow]:
        """Return the latency buckets of one to two windows ago, at first those of the first flush."""
        if not self._latency_history:
            self._first_report_at = at if self._first_report_at is None else self._first_report_at
            if at - self._first_report_at < _FLUSH_SECONDS:
                return counters.latency_buckets(rows)
        if not self._latency_history or at - self._latency_history[-1][0] >= _RECENT_WINDOW_SECONDS:
            self._latency_history.append((at, counters.latency_buckets(rows)))
        return self._latency_history[0][1]
