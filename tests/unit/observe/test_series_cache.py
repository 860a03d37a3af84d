"""Series that were told before: known again by their bytes, with the same outcome as when they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.traffic import SESSION_STATES, ModuleReport
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
KNOWN = frozenset((A, B))
LOGINS = COLUMNS["logins", ""]
NOON = 1_800_000_000_000  # Unix time in milliseconds


def timed(serialised: bytes, at: int = NOON) -> bytes:
    """A family with the time that Envoy puts behind each value; a value of zero is an empty message there."""
    made = MetricFamily.FromString(serialised)
    (metric,) = made.metric
    is_zero = not (metric.counter or metric.gauge)
    body = metric.SerializeToString() + (b"\x1a\x00" if is_zero else b"") + b"\x30" + varint(at)
    return bytes(MetricFamily(name=made.name).SerializeToString() + delimited(4, body))


def logins(count: float, node: str = A, at: int = NOON) -> bytes:
    return timed(metric_family("tidevoy.logins", count, node=node), at)


def knowing(*families: bytes, node: str = A) -> tuple[SeriesCache, NodeCounters]:
    """One that has learned these, which are logins, and a tally with a row for the node."""
    recall, tally = SeriesCache(), NodeCounters()
    for each in families:
        (metric,) = MetricFamily.FromString(each).metric
        recall.add(each, Value.FromString(metric.counter).value, node, LOGINS)
    tally.set_value(node, LOGINS, -1.0)
    return recall, tally


@pytest.mark.parametrize("count", [1, 7.0, 2.0**40])
def test_a_series_is_known_again_with_another_value_at_another_time(count: float) -> None:
    recall, tally = knowing(logins(5))
    assert recall.apply_known([logins(count, at=NOON + 1_000)], tally) == []
    assert tally.rows[A][LOGINS] == count


def test_a_zero_has_bytes_of_its_own() -> None:
    recall, tally = knowing(logins(5), logins(0))
    assert recall.apply_known([logins(3)], tally) == []
    assert recall.apply_known([logins(0, at=NOON + 5)], tally) == []
    assert tally.rows[A][LOGINS] == 0
    unaware, fresh = knowing(logins(5))
    assert unaware.apply_known([logins(0)], fresh) == [logins(0)]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 2.0**63])
def test_what_is_no_count_is_left_to_be_read(value: float) -> None:
    recall, tally = knowing(logins(5))
    assert recall.apply_known([logins(value)], tally) == [logins(value)]


def test_other_nodes_and_other_forms_are_left_to_be_read() -> None:
    recall, tally = knowing(logins(5))
    untimed = metric_family("tidevoy.logins", 6, node=A)
    gauge = timed(metric_family("tidevoy.logins", 5, gauge=True, node=A))
    others = [logins(5, B), untimed, gauge, b"torn, tidevoy."]
    assert recall.apply_known(others, tally) == others
    assert (
        recall.apply_known([timed(metric_family("cluster.tidb.total", 5)), b"", b"\x00" * 40], tally) == []
    )  # not ours
    for each in (untimed, b"", b"\x00" * 40):
        recall.add(each, 6.0, A, LOGINS)
    assert recall.apply_known([untimed], tally) == [untimed]


def test_a_node_that_is_forgotten_is_left_to_be_read() -> None:
    recall, tally = knowing(logins(5))
    tally.retain(frozenset((B,)))
    assert recall.apply_known([logins(6)], tally) == [logins(6)]


def test_a_row_that_was_given_away_is_not_changed_any_more() -> None:
    recall, tally = knowing(logins(5))
    recall.apply_known([logins(6)], tally)
    before = tally.snapshot()
    recall.apply_known([logins(7)], tally)
    assert (before[A][LOGINS], tally.rows[A][LOGINS]) == (6, 7)
    assert tally.snapshot()[A] is tally.snapshot()[A]  # nothing new was told, so nothing is copied


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
def test_a_stream_that_knows_all_again_tells_the_same_as_one_that_reads(
    flushes: list[dict[tuple[str, str, int], float]],
) -> None:
    shared = SeriesCache()
    knowing_ones = [TelemetryStream(lambda: KNOWN, shared) for _ in range(2)]
    reading_one = TelemetryStream(lambda: KNOWN)
    for number, flush in enumerate(flushes):
        at = NOON // 1000 + number
        timed_ones = [_series(*each, value, at * 1000) for each, value in flush.items()]
        # Without a time behind the value nothing is known again.
        plain = [_series(*each, value) for each, value in flush.items()]
        expected = _told(reading_one, plain, float(at))
        assert [_told(each, timed_ones, float(at)) for each in knowing_ones] == [expected] * 2


def test_all_that_a_module_tells_is_known_again() -> None:
    shared, tally = SeriesCache(), NodeCounters()
    families = [timed(each) for each in all_families(A)]
    fed = TelemetryStream(lambda: KNOWN, shared)
    fed.receive(metrics_message(*families, envoy="e1"), 1.0)
    for each in (A, ""):
        tally.set_value(each, 0, 0.0)
    assert (
        shared.apply_known(families, tally) == families[:1]
    )  # which says who tells it, and that the flush is over


def _series(name: str, node: str, state: int, value: float, at: int | None = None) -> bytes:
    labels = {"node": node} | ({"state": SESSION_STATES[state]} if name == "sessions" else {})
    made = metric_family(f"tidevoy.{name}", value, gauge=name == "sessions", **labels)
    return made if at is None else timed(made, at)


def _told(fed: TelemetryStream, families: Sequence[bytes], at: float) -> ModuleReport | None:
    return fed.receive(metrics_message(*families, module_info_family(), envoy="e1"), at)
