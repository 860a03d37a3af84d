"""The series cache: cached series give the same result as parsed series."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.traffic import SESSION_STATES, ModuleReport
from controlplane.observe.envoy_reports import series_cache
from controlplane.observe.envoy_reports.counters import COLUMNS, NodeCounters
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_pb2 import MetricFamily, Value
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.xds.protobuf_encoding import delimited, varint
from tests.support.controlplane.telemetry_messages import (
    all_families,
    metric_family,
    metrics_message,
    module_info_family,
)

A, B = "10.0.0.1:4000", "[fd00::1]:4000"
KNOWN_NODES = frozenset((A, B))
LOGINS = COLUMNS["logins", ""]
NOW_MS = 1_800_000_000_000  # Unix time in milliseconds


def with_time(serialized: bytes, at: int = NOW_MS) -> bytes:
    """Add a timestamp after the value, and encode a zero as an empty message, as Envoy does."""
    family = MetricFamily.FromString(serialized)
    (metric,) = family.metric
    is_zero = not (metric.counter or metric.gauge)
    body = metric.SerializeToString() + (b"\x1a\x00" if is_zero else b"") + b"\x30" + varint(at)
    return bytes(MetricFamily(name=family.name).SerializeToString() + delimited(4, body))


def logins(count: float, node: str = A, at: int = NOW_MS) -> bytes:
    return with_time(metric_family("tidevoy.logins", count, node=node), at)


def cache_with(*families: bytes, node: str = A) -> tuple[SeriesCache, NodeCounters]:
    """Return a cache with these login series, and counters with a row for the node."""
    cache, counters = SeriesCache(), NodeCounters()
    for family in families:
        (metric,) = MetricFamily.FromString(family).metric
        cache.add(family, Value.FromString(metric.counter).value, node, LOGINS)
    counters.set_value(node, LOGINS, -1.0)
    return cache, counters


@pytest.mark.parametrize("count", [1, 7.0, 2.0**40])
def test_cached_series_is_found_with_another_value_and_time(count: float) -> None:
    cache, counters = cache_with(logins(5))
    assert cache.apply_known([logins(count, at=NOW_MS + 1_000)], counters) == []
    assert counters.rows[A][LOGINS] == count


def test_zero_value_has_its_own_cache_entry() -> None:
    cache, counters = cache_with(logins(5), logins(0))
    assert cache.apply_known([logins(3)], counters) == []
    assert cache.apply_known([logins(0, at=NOW_MS + 5)], counters) == []
    assert counters.rows[A][LOGINS] == 0
    cache, counters = cache_with(logins(5))
    assert cache.apply_known([logins(0)], counters) == [logins(0)]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 2.0**63])
def test_invalid_count_is_left_to_the_parser(value: float) -> None:
    cache, counters = cache_with(logins(5))
    assert cache.apply_known([logins(value)], counters) == [logins(value)]


def test_other_nodes_and_layouts_are_left_to_the_parser() -> None:
    cache, counters = cache_with(logins(5))
    without_time = metric_family("tidevoy.logins", 6, node=A)
    gauge = with_time(metric_family("tidevoy.logins", 5, gauge=True, node=A))
    others = [logins(5, B), without_time, gauge, b"torn, tidevoy."]
    assert cache.apply_known(others, counters) == others
    assert (
        cache.apply_known([with_time(metric_family("cluster.tidb.total", 5)), b"", b"\x00" * 40], counters)
        == []
    )  # these families are not of the module, so they are dropped
    for family in (without_time, b"", b"\x00" * 40):
        cache.add(family, 6.0, A, LOGINS)
    assert cache.apply_known([without_time], counters) == [without_time]


def test_forgotten_node_is_left_to_the_parser() -> None:
    cache, counters = cache_with(logins(5))
    counters.retain(frozenset((B,)))
    assert cache.apply_known([logins(6)], counters) == [logins(6)]


def test_rows_of_a_snapshot_do_not_change() -> None:
    cache, counters = cache_with(logins(5))
    cache.apply_known([logins(6)], counters)
    before = counters.snapshot()
    cache.apply_known([logins(7)], counters)
    assert (before[A][LOGINS], counters.rows[A][LOGINS]) == (6, 7)
    assert counters.snapshot()[A] is counters.snapshot()[A]  # nothing changed, so nothing is copied


def test_full_cache_keeps_most_series_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1_000
    monkeypatch.setattr(series_cache, "_MAX_SERIES", limit)
    cache, counters = cache_with(*(logins(1, f"removed-{number}:4000") for number in range(limit)))

    def parsed_in_a_flush(live_series: int) -> int:
        """Return how many series were not cached."""
        flush = [logins(1, f"tidb-{number}:4000") for number in range(live_series)]
        unknown = cache.apply_known(flush, counters)
        for family in unknown:
            cache.add(family, 1.0, A, LOGINS)
        return len(unknown)

    for _ in range(30):
        parsed_in_a_flush(limit * 6 // 5)
    assert limit // 5 <= parsed_in_a_flush(limit * 6 // 5) < limit * 3 // 5
    for _ in range(30):
        parsed_in_a_flush(limit // 2)
    assert parsed_in_a_flush(limit // 2) < limit // 100


NODES = st.sampled_from([A, B, "10.9.9.9:1"])
SERIES = st.tuples(st.just("sessions"), NODES, st.integers(0, 4)) | st.tuples(
    st.just("logins"), NODES, st.just(0)
)
FLUSHES = st.lists(
    st.dictionaries(
        SERIES,
        st.sampled_from([0, 1, 2, 300, -1, math.nan]),
        max_size=8,
    ),
    min_size=1,
    max_size=6,
)


@given(flushes=FLUSHES)
def test_cached_and_parsed_streams_give_equal_reports(
    flushes: list[dict[tuple[str, str, int], float]],
) -> None:
    shared_cache = SeriesCache()
    cached_streams = [TelemetryStream(lambda: KNOWN_NODES, shared_cache) for _ in range(2)]
    parsing_stream = TelemetryStream(lambda: KNOWN_NODES)
    for number, flush in enumerate(flushes):
        at = NOW_MS // 1000 + number
        with_times = [_series(*series, value, at * 1000) for series, value in flush.items()]
        # A series without a timestamp is never cached.
        without_times = [_series(*series, value) for series, value in flush.items()]
        expected = _receive(parsing_stream, without_times, float(at))
        reports = [_receive(stream, with_times, float(at)) for stream in cached_streams]
        assert reports == [expected] * 2


def test_all_series_of_a_module_are_cached() -> None:
    cache, counters = SeriesCache(), NodeCounters()
    families = [with_time(family) for family in all_families(A)]
    stream = TelemetryStream(lambda: KNOWN_NODES, cache)
    stream.receive(metrics_message(*families, envoy="e1"), 1.0)
    for node in (A, ""):
        counters.set_value(node, 0, 0.0)
    # Only `module_info` is parsed in each flush.
    assert cache.apply_known(families, counters) == families[:1]


def _series(name: str, node: str, state: int, value: float, at: int | None = None) -> bytes:
    labels = {"node": node} | ({"state": SESSION_STATES[state]} if name == "sessions" else {})
    family = metric_family(f"tidevoy.{name}", value, gauge=name == "sessions", **labels)
    return family if at is None else with_time(family, at)


def _receive(stream: TelemetryStream, families: Sequence[bytes], at: float) -> ModuleReport | None:
    return stream.receive(metrics_message(*families, module_info_family(), envoy="e1"), at)
