"""Parses the metrics service stream of an Envoy into reports of its Tidevoy module. No I/O.

Protocol: envoyproxy/envoy api/envoy/service/metrics/v3/metrics_service.proto. A flush is one periodic export
of all stats (`stats_flush_interval`). Observed behavior of Envoy 1.40.0 with `emit_tags_as_labels`:

* Every flush contains all stats that were ever set. Counters count from the start of the Envoy. Each series
  is a separate family, so several families have the same name.
* Only the first message of a stream contains the identifier, which has 60 kB.
* With `batch_size`, a flush consists of several messages, so most messages lack most series. A stream begins
  with the first message of a flush.
* In a flush, all counters come before all gauges. `module_info` is a gauge.
* Each series has the timestamp of its flush, by the Envoy's clock. It shows the age of a message that waited
  in a socket.
* Label names and values arrive as the module set them. They may be empty or contain any character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from google.protobuf.message import DecodeError

from controlplane.model.capture import CAPTURE_COUNTS, CaptureCounts
from controlplane.model.limits import LimitUsage
from controlplane.model.module_switches import SWITCHES
from controlplane.model.rules import RuleHits
from controlplane.model.traffic import (
    EJECT_REASONS,
    Ejection,
    LazyTrafficByNode,
    LogCounts,
    ModuleReport,
    SessionCounts,
    Traffic,
)
from controlplane.module_calls import INSTANCE_PATTERN
from controlplane.observe.clock_offset import ClockOffset
from controlplane.observe.envoy_reports import counters
from controlplane.observe.envoy_reports.counters import COLUMNS, FAMILIES, CounterRow, NodeCounters
from controlplane.observe.envoy_reports.series_cache import VALUE_LIMIT, SeriesCache
from controlplane.observe.envoy_reports.telemetry_pb2 import (
    LabelPair,
    MetricFamily,
    StreamMetricsMessage,
    Value,
)

_METRIC_PREFIX = "tidevoy."
_NO_NODE = ""
_MAX_REJECTION_CHARS = 500
_MAX_LABEL_CHARS = 64  # maximum length of a version or an extension name
_MAX_REJECTIONS = 16
_ENDING_PHASE = 2  # of the drain of an Envoy: from here on, it refuses new clients
_MAX_LIMITS = 1000  # an Envoy reports also the rules that were removed since its start
_MAX_RULES = 10_000  # the same for rules for statements
_NO_LIMIT_USAGE = LimitUsage()
_LIMIT_FIELDS = {
    "limit_connections": "connections",
    "limit_quota": "quota",
    "limit_over_quota": "is_over_quota",
    "limit_refusals": "refused",
}
_CAPTURE_FIELDS = {
    "capture_until": "until_ms",
    "capture_active": "is_active",
    **{f"capture_{name}": name for name in CAPTURE_COUNTS},
}
_RECENT_WINDOW_SECONDS = 60.0  # "recent" values cover the last one to two windows
_FLUSH_SECONDS = 1.0  # all messages of one flush arrive within this time
_LOGS = ("login_log", "statement_log")
_LOG_FIELDS = frozenset(field.name for field in fields(LogCounts))


class _FlushTracker:
    """Determines when a stream has delivered all series, and which nodes have complete session counts.

    Nothing marks the end of a flush, but each flush contains `module_info` once. So when the second
    `module_info` arrives, all series of the first flush have arrived, and no value is older than that flush.
    A node is complete if no session count of the node was dropped in the last two flushes.
    """

    def __init__(self) -> None:
        self.oldest_count_at: float | None = None  # no value is older than this; None: series may be missing
        self.complete_nodes: Set[str] = frozenset()
        self._last_info_at: float | None = None
        self._complete_since_info: Set[str] | None = None  # nodes complete since the latest `module_info`
        self._complete_before_info: Set[str] = frozenset()  # complete between the last two `module_info`

    def add_message(self, at: float, complete: Set[str], *, has_info: bool) -> None:
        """Record a message. `has_info`: it contains `module_info`.

        `complete`: the nodes of which no session count in the message was dropped.
        """
        self._complete_since_info = (
            complete if self._complete_since_info is None else _intersect(self._complete_since_info, complete)
        )
        self.complete_nodes = _intersect(self.complete_nodes, complete)
        if not has_info:
            return
        if self._last_info_at is not None:
            self.oldest_count_at = self._last_info_at - _FLUSH_SECONDS
            self.complete_nodes = _intersect(self._complete_before_info, self._complete_since_info)
        self._last_info_at, self._complete_since_info, self._complete_before_info = (
            at,
            complete,
            self._complete_since_info,
        )


def _parse_flush_time(families: Sequence[bytes]) -> float:
    """Return the time of the flush, by the Envoy's clock, from the first family; 0: unknown."""
    try:
        metrics = MetricFamily.FromString(families[0]).metric if families else ()
        return float(metrics[0].timestamp_ms / 1000) if metrics else 0.0
    except DecodeError:
        return 0.0


def _intersect(one: Set[str], other: Set[str]) -> Set[str]:
    return one if one is other else one & other  # `one` and `other` are nearly always the same large set


class TelemetryStream:
    """The state of one stream. A restarted Envoy opens a new stream, which starts with an empty state."""

    def __init__(
        self,
        known_nodes: Callable[[], Set[str]],
        series_cache: SeriesCache | None = None,
        *,
        resumed_envoy: str = "",
    ) -> None:
        """`known_nodes` returns the addresses of all nodes; series of unknown nodes are dropped.

        `series_cache` may be shared with other streams. `resumed_envoy`: the Envoy id if the beginning of
        the stream was missed; such a stream gives reports only after a complete flush.
        """
        self.envoy = resumed_envoy  # Envoy id from the first message; empty if the message has none
        self.last_message_at = 0.0
        """Time at which the Envoy made the latest message, by our clock."""
        self._known_nodes = known_nodes
        self._latest_known_nodes: Set[str] = frozenset()
        self._series_cache = series_cache or SeriesCache()
        self._version = self._instance = ""
        self._counters = NodeCounters()
        self._rejections: dict[tuple[str, str], int] = {}
        self._ejected_since: dict[tuple[str, str], int] = {}  # by node and reason
        self._runtime_off: frozenset[str] = frozenset()
        self._logs: dict[str, LogCounts] = {}  # by name; a log that has been off has none
        self._capture: CaptureCounts | None = None
        self._is_ending = self._has_ended = False
        self._limits: dict[str, LimitUsage] = {}  # by name of the rule
        self._rule_hits: dict[str, RuleHits] = {}  # by name of the rule
        self._quotas_before: dict[str, int] = {}  # of `_limits` at the previous report
        self._dropped = 0
        self._flush_tracker = _FlushTracker()
        self._clock_offset = ClockOffset(is_ordered=True)
        self._has_timestamps = False  # whether the Envoy's messages have timestamps
        self._has_reported = False
        self._missed_start = bool(resumed_envoy)
        self._has_info = False
        self._incomplete_nodes: set[str] = set()
        self._has_counted_sessions = False
        self._first_report_at: float | None = None
        self._latency_history: deque[tuple[float, Mapping[str, CounterRow]]] = deque(maxlen=2)

    def receive(self, data: bytes, at: float) -> ModuleReport | None:
        """Apply a message that arrived at the time `at`; return one report per flush, else None.

        The message with `module_info`, which follows all counters of a flush, triggers the report. Series
        after it are in the next report. A report per message would take more time than parsing the message.
        """
        known_nodes = self._known_nodes()
        if known_nodes is not self._latest_known_nodes:
            self._latest_known_nodes = known_nodes
            self._counters.retain(known_nodes | {_NO_NODE})
        try:
            message, unreadable_count = StreamMetricsMessage.FromString(data), 0
        except DecodeError:
            message, unreadable_count = StreamMetricsMessage(), 1
        families = message.envoy_metrics[:]
        self.envoy = self.envoy or message.identifier.node.id
        flushed_at = _parse_flush_time(families)
        if flushed_at:
            self._clock_offset.observe(flushed_at, at)
            self._has_timestamps = True
            at = self._clock_offset.to_local(flushed_at)
        self.last_message_at = at
        self._has_info = False
        self._incomplete_nodes.clear()
        for family in self._series_cache.apply_known(families, self._counters):
            try:
                self._apply_family(family, known_nodes)
            except (DecodeError, ValueError):
                unreadable_count += 1
        self._dropped += unreadable_count
        if unreadable_count:
            self._flush_tracker = _FlushTracker()  # sessions may be among the unreadable series
        else:
            self._flush_tracker.add_message(
                at,
                known_nodes - self._incomplete_nodes if self._incomplete_nodes else known_nodes,
                has_info=self._has_info,
            )
        if not self._has_info:
            return None
        if self._missed_start:
            # The messages so far may be only the end of a flush; all later flushes are complete.
            self._missed_start, self._flush_tracker = False, _FlushTracker()
            return None
        is_first, self._has_reported = not self._has_reported, True
        return self._build_report(at, is_first=is_first)

    def _apply_family(self, serialised: bytes, known_nodes: Set[str]) -> None:
        """Apply the series of a family. Raises DecodeError or ValueError if a series is malformed."""
        family = MetricFamily.FromString(serialised)
        if not family.name.startswith(_METRIC_PREFIX):
            return
        # Iterating over a slice is twice as fast as over the container.
        name, metrics = family.name.removeprefix(_METRIC_PREFIX), family.metric[:]
        for metric in metrics:
            pairs = map(LabelPair.FromString, metric.label[:])
            labels = {pair.name: pair.value for pair in pairs}
            value = Value.FromString(metric.counter or metric.gauge).value
            if not 0 <= value < VALUE_LIMIT:  # this rejects NaN too
                raise ValueError
            if name not in FAMILIES:
                is_valid = self._apply_info(name, labels, int(value))
            else:
                cacheable = serialised if len(metrics) == 1 else b""
                is_valid = self._apply_count(name, labels, int(value), known_nodes, cacheable)
            self._dropped += not is_valid

    def _apply_count(
        self, name: str, labels: Mapping[str, str], value: int, known_nodes: Set[str], cacheable: bytes
    ) -> bool:
        """Store a count; return whether its labels are valid. `cacheable`: the bytes to cache, or empty."""
        self._has_counted_sessions = True
        node = labels.get("node", _NO_NODE)
        column = COLUMNS.get((name, "/".join(labels.get(label, "") for label in FAMILIES[name].labels)))
        if column is None or (node != _NO_NODE and node not in known_nodes):
            if name == "sessions" and value:
                self._incomplete_nodes.add(node)  # its session count lacks these sessions
            return False
        self._counters.set_value(node, column, value)
        self._series_cache.add(cacheable, value, node, column)
        return True

    def _apply_info(self, name: str, labels: Mapping[str, str], value: int) -> bool:
        """Store a series that is not a count; return whether it is valid. Unknown names are valid."""
        if name == "module_info":
            self._has_info = True
            self._version = labels.get("version", "")[:_MAX_LABEL_CHARS]
            instance = labels.get("instance", "")
            self._instance = instance if INSTANCE_PATTERN.fullmatch(instance) else ""
        elif name == "config_refusals" and value:
            extension, text = labels.get("extension", ""), labels.get("text", "")
            rejection = (extension[:_MAX_LABEL_CHARS], text[:_MAX_REJECTION_CHARS])
            if rejection not in self._rejections and len(self._rejections) >= _MAX_REJECTIONS:
                return False
            self._rejections[rejection] = value
        elif name == "switched_off" and labels.get("by") == "runtime":
            return self._apply_runtime_switch(labels.get("part", ""), is_off=bool(value))
        elif name == "drain_phase":
            self._is_ending = value >= _ENDING_PHASE
        elif name == "has_ended":
            self._has_ended = bool(value)
        elif name.endswith("_log_lines"):
            return self._apply_log(name.removesuffix("_lines"), labels.get("result", ""), value)
        elif name.endswith("_log_write_errors"):
            return self._apply_log(name.removesuffix("_write_errors"), "write_errors", value)
        elif name in _CAPTURE_FIELDS:
            self._apply_capture(_CAPTURE_FIELDS[name], value)
        elif name in _LIMIT_FIELDS:
            return self._apply_limit(_LIMIT_FIELDS[name], labels.get("rule", ""), value)
        elif name == "rule_hits":
            return self._apply_rule_hits(
                labels.get("rule", ""), value, is_dry_run=labels.get("dry_run") == "true"
            )
        elif name == "ejected_since":
            return self._apply_ejection(labels.get("node", _NO_NODE), labels.get("reason", ""), value)
        return True

    def _apply_runtime_switch(self, part: str, *, is_off: bool) -> bool:
        if part not in SWITCHES:
            return False
        self._runtime_off = self._runtime_off | {part} if is_off else self._runtime_off - {part}
        return True

    def _apply_log(self, log: str, field: str, value: int) -> bool:
        if log not in _LOGS:
            return True  # a log of a later module
        if field not in _LOG_FIELDS:
            return False
        self._logs[log] = replace(self._logs.get(log, LogCounts()), **{field: value})
        return True

    def _apply_capture(self, field: str, value: int) -> None:
        counts = self._capture or CaptureCounts()
        if field == "until_ms" and value != counts.until_ms:
            counts = CaptureCounts()  # the others may be those of the capture before, until the next flush
        change: dict[str, Any] = {field: bool(value) if field == "is_active" else value}
        self._capture = replace(counts, **change)

    def _apply_limit(self, field: str, rule: str, value: int) -> bool:
        if rule not in self._limits and (not rule or len(self._limits) >= _MAX_LIMITS):
            return False
        usage = self._limits.get(rule[:_MAX_LABEL_CHARS], _NO_LIMIT_USAGE)
        change: dict[str, Any] = {field: bool(value) if field == "is_over_quota" else value}
        self._limits[rule[:_MAX_LABEL_CHARS]] = replace(usage, **change)
        return True

    def _apply_rule_hits(self, rule: str, value: int, *, is_dry_run: bool) -> bool:
        rule = rule[:_MAX_LABEL_CHARS]
        if rule not in self._rule_hits and (not rule or len(self._rule_hits) >= _MAX_RULES):
            return False
        hits = self._rule_hits.get(rule, RuleHits())
        self._rule_hits[rule] = hits._replace(**{"dry_run_hits" if is_dry_run else "hits": value})
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

        tracker, session_counts = self._flush_tracker, None
        if tracker.oldest_count_at is not None:
            session_counts = SessionCounts(
                at,
                tracker.oldest_count_at,
                dict(self._counters.sessions),
                tracker.complete_nodes,
                self._has_counted_sessions,
                self._instance,
            )
        return ModuleReport(
            envoy=self.envoy,
            at=at,
            version=self._version,
            instance=self._instance,
            nodes=LazyTrafficByNode(rows, traffic),
            migrations=dict(self._counters.migrations),
            rejections=MappingProxyType(dict(self._rejections)),
            ejections=self._ejections(),
            is_ending=self._is_ending,
            has_ended=self._has_ended,
            runtime_off=self._runtime_off,
            limits=self._limit_usages(),
            rule_hits=MappingProxyType(dict(self._rule_hits)),
            dropped_series=self._dropped,
            logs=MappingProxyType(dict(self._logs)),
            capture=self._capture,
            session_counts=session_counts,
            is_first=is_first,
        )

    def _limit_usages(self) -> Mapping[str, LimitUsage]:
        """Return the use of all limits, with the larger one of the last two quotas.

        Quota and connections may be from two consecutive flushes. With the connections from before a lower
        quota took effect, this quota would seem to be more than the Envoy uses.
        """
        before, self._quotas_before = self._quotas_before, {r: u.quota for r, u in self._limits.items()}
        return MappingProxyType(
            {
                rule: replace(usage, quota=max(usage.quota, before.get(rule, 0)))
                for rule, usage in self._limits.items()
            }
        )

    def _ejections(self) -> Mapping[str, Ejection]:
        """Return the latest ejection of each node, with times by our clock."""
        oldest_first = sorted(self._ejected_since.items(), key=lambda item: item[1])
        to_local = self._clock_offset.to_local if self._has_timestamps else float
        return {
            node: Ejection(self.envoy, reason, round(to_local(since)))
            for (node, reason), since in oldest_first
            if node in self._latest_known_nodes
        }

    def _baseline(self, rows: Mapping[str, CounterRow], at: float) -> Mapping[str, CounterRow]:
        """Return the latency buckets of one to two windows ago, or else of the first flush."""
        if not self._latency_history:
            self._first_report_at = at if self._first_report_at is None else self._first_report_at
            if at - self._first_report_at < _FLUSH_SECONDS:
                return counters.latency_buckets(rows)
        if not self._latency_history or at - self._latency_history[-1][0] >= _RECENT_WINDOW_SECONDS:
            self._latency_history.append((at, counters.latency_buckets(rows)))
        return self._latency_history[0][1]
