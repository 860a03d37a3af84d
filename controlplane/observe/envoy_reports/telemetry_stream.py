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
_MAX_REJECTION_CHARS = 500  # characters of a refusal that are kept
_MAX_LABEL_CHARS = 64  # characters of a version or an extension's name that are kept
_MAX_REJECTIONS = 16
_RECENT_WINDOW_SECONDS = 60.0  # seconds; what is "recent" is between one and two of these old
_FLUSH_SECONDS = 1.0  # seconds within which the batches of one flush arrive
_INSTANCE_PATTERN = re.compile(r"[0-9a-f]{16}")


class ModuleSeries(NamedTuple):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: int
    serialised_family: bytes = b""  # as it came, if it came alone


@dataclass(slots=True)
class ParsedMessage:
    """What a message holds of the series that were looked for. `unreadable` counts what could not be read."""

    envoy: str = ""  # empty in all but the first message
    series: list[ModuleSeries] = field(default_factory=list)
    unreadable_count: int = 0
    flushed_at: float = 0.0  # when, in Unix time by the Envoy's clock; 0: it does not tell


def parse_message(data: bytes, prefix: str = _METRIC_PREFIX) -> ParsedMessage:
    """The series of a message whose names begin with `prefix`. What is malformed is counted, never raised."""
    try:
        message = StreamMetricsMessage.FromString(data)
        return ParsedMessage(message.identifier.node.id, *_parse_families(message.envoy_metrics, prefix))
    except DecodeError:
        return ParsedMessage(unreadable_count=1)


def _parse_families(families: Iterable[bytes], prefix: str) -> tuple[list[ModuleSeries], int]:
    """Those whose names begin with `prefix`, and how many families could not be read."""
    series: list[ModuleSeries] = []
    unreadable = 0
    encoded_prefix = prefix.encode()
    parsed_labels: dict[bytes, tuple[str, str]] = {}
    for serialised in families:
        # Hundreds of Envoy's own families come along; parsing them for their names costs five times as much.
        if encoded_prefix not in serialised:
            continue
        try:
            family = MetricFamily.FromString(serialised)
            if not family.name.startswith(prefix):
                continue
            metrics = family.metric[:]  # a slice is twice as quick to walk as the container
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
    """When a message was made; all that is in it tells the same."""
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
    """ValueError when it is no number of ours."""
    value = Value.FromString(metric.counter or metric.gauge).value
    if not 0 <= value < _VALUE_LIMIT:  # which NaN is not either
        raise ValueError
    return int(value)


class _FlushTracker:
    """Tells when a stream has told all that there is to tell, and of which nodes.

    Nothing says where a flush ends. But each has `module_info` once, so all series have come between its
    second time and the first, or at most the time of a flush before that. Nodes that were clear all the
    while, and one flush longer, were not left out of it.
    """

    def __init__(self) -> None:
        self.counting_since: float | None = None  # no value is older; None: not all gauges have come yet
        self.complete_nodes: Set[str] = frozenset()
        self._last_info_at: float | None = None
        self._complete_since_info: Set[str] | None = None  # nodes that were so since the latest mark
        self._complete_before_info: Set[str] = frozenset()  # and between that one and the one before it

    def add_message(self, at: float, complete: Set[str], *, has_info: bool) -> None:
        """A message came. `clear`: nodes of which it left nothing out; `marked`: it had `module_info`."""
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
    return one if one is other else one & other  # nearly always the same set, of thousands


class TelemetryStream:
    """What one stream has told so far. A new stream begins anew, so an Envoy's restart needs no detecting."""

    def __init__(
        self,
        known_nodes: Callable[[], Set[str]],
        series_cache: SeriesCache | None = None,
        *,
        resumed_envoy: str = "",
    ) -> None:
        """`known` gives the addresses of the nodes there are; what is said of others is left out.

        `recall` knows what other streams have told. `joined` is the Envoy of a stream whose beginning was
        missed: nothing is told of it before a whole flush has come.
        """
        self.envoy = resumed_envoy  # known from the first message on; empty after it: it did not say
        self.last_message_at = 0.0
        """When its latest message was made, by our clock."""
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
        self._has_timestamps = False  # whether the Envoy's messages say when they were made
        self._has_reported = False
        self._missed_start = bool(resumed_envoy)
        self._has_info = False
        self._incomplete_nodes: set[str] = set()
        self._has_served = False
        self._first_report_at: float | None = None
        self._latency_history: deque[tuple[float, Mapping[str, CounterRow]]] = deque(maxlen=2)

    def receive(self, data: bytes, at: float) -> ModuleReport | None:
        """Take in a message that has come now; all that is known after it, once a flush.

        That is with `module_info`, behind all counters of the flush. What comes behind it is told with the
        next one: a report of all nodes for each of many messages would cost more than all that they hold.
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
            self._flush_tracker = _FlushTracker()  # it may have been sessions
        else:
            self._flush_tracker.add_message(
                at,
                known_nodes - self._incomplete_nodes if self._incomplete_nodes else known_nodes,
                has_info=self._has_info,
            )
        if not self._has_info:
            return None
        if self._missed_start:
            # What came before may be the end of a flush; all that follows is whole.
            self._missed_start, self._flush_tracker = False, _FlushTracker()
            return None
        is_first, self._has_reported = not self._has_reported, True
        return self._build_report(at, is_first=is_first)

    def _parse_unknown(self, data: bytes) -> ParsedMessage:
        """What is not known again."""
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
        """Whether the series could be used. A name that is not ours to know is no failure."""
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
                self._incomplete_nodes.add(
                    node
                )  # of a module that knows more states, there are sessions left out
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

        def traffic(node: str, told: CounterRow) -> Traffic:
            return counters.build_traffic(told, baseline.get(node))

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
        """The latest ejection of each node, with times of our clock."""
        oldest_first = sorted(self._ejected_since.items(), key=lambda item: item[1])
        our_time = self._clock_offset.to_local if self._has_timestamps else float
        return MappingProxyType(
            {
                node: Ejection(self.envoy, reason, round(our_time(since)))
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
        """The latencies of one to two windows ago, at first those of the stream's first flush."""
        if not self._latency_history:
            self._first_report_at = at if self._first_report_at is None else self._first_report_at
            if at - self._first_report_at < _FLUSH_SECONDS:
                return counters.latency_buckets(rows)
        if not self._latency_history or at - self._latency_history[-1][0] >= _RECENT_WINDOW_SECONDS:
            self._latency_history.append((at, counters.latency_buckets(rows)))
        return self._latency_history[0][1]
