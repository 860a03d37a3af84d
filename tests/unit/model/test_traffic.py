"""Sums of traffic counters, and quantiles of a histogram."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.schemas.traffic import EjectionDetails
from controlplane.model import traffic as traffic_model
from controlplane.model.traffic import EMPTY_BUCKETS, LATENCY_BOUNDS_SECONDS, Traffic, quantile, sum_traffic
from controlplane.observe.envoy_reports.counters import FAMILIES

FILTERS = Path(__file__).parents[3] / "filters"


def rust_string_literals(file: str, start: str, end: str) -> tuple[str, ...]:
    """Return the string literals between two texts of a Rust file under `filters`."""
    _, separator, rest = (FILTERS / file).read_text().partition(start)
    assert separator, f"{file} does not contain {start!r}"
    return tuple(re.findall(r'"([^"]+)"', rest[: rest.index(end)]))


def test_label_values_match_the_module() -> None:
    """The control plane drops counts with other label values."""
    proxy_errors = rust_string_literals("mysql-proto/src/error.rs", "pub const fn name(", "\n    }")
    other_failures = rust_string_literals(
        "module/src/node.rs", "Self::Error(error) => error.name()", "\n    }"
    )
    assert (*proxy_errors, *other_failures) == traffic_model.LOGIN_FAILURES
    node = "module/src/node.rs"
    assert rust_string_literals(node, "impl SessionState {", "];") == traffic_model.SESSION_STATES
    assert rust_string_literals(node, "const PINNED:", "];") == traffic_model.NOT_MOVABLE_REASONS
    assert rust_string_literals(node, "impl ConnectFailure {", "];") == traffic_model.CONNECT_FAILURES
    assert (
        rust_string_literals("module/src/ejection.rs", "fn name(self)", "\n    }")
        == traffic_model.EJECT_REASONS
    )
    assert get_args(EjectionDetails.model_fields["reason"].annotation) == traffic_model.EJECT_REASONS
    assert rust_string_literals(node, "const KINDS:", "];") == traffic_model.COMMANDS
    assert rust_string_literals(node, "const ERRORS:", "];") == traffic_model.ERRORS
    migrations = rust_string_literals(node, "const MIGRATION_RESULTS:", "];")
    pairs = tuple(map("/".join, zip(migrations[::2], migrations[1::2], strict=True)))
    assert pairs == FAMILIES["migrations"].values
    assert rust_string_literals(node, "const BUCKET_NAMES:", "];") == (
        *(f"{bound:g}" for bound in LATENCY_BOUNDS_SECONDS),
        "+Inf",
    )


def test_sum_includes_all_fields() -> None:
    part = Traffic(
        sessions={"idle": 1},
        not_movable={"cursor": 2},
        logins=3,
        login_failures={"denied": 4},
        connect_failures={"tls": 5},
        commands={"ping": 6},
        latency_buckets=(7,) * 14,
        latency_sum_seconds=0.5,
        recent_latency_buckets=(8,) * 14,
        errors={"syntax": 9},
        bytes={"to_node": 10},
        migrations={("moved", "ok"): 11},
        migration_buckets=(12,) * 14,
        migration_sum_seconds=0.25,
    )
    other = Traffic(sessions={"idle": 10, "busy": 1}, logins=1)
    assert sum_traffic([]) == Traffic()
    assert sum_traffic([part]) == part
    assert sum_traffic([part, other, part]) == Traffic(
        sessions={"idle": 12, "busy": 1},
        not_movable={"cursor": 4},
        logins=7,
        login_failures={"denied": 8},
        connect_failures={"tls": 10},
        commands={"ping": 12},
        latency_buckets=(14,) * 14,
        latency_sum_seconds=1.0,
        recent_latency_buckets=(16,) * 14,
        errors={"syntax": 18},
        bytes={"to_node": 20},
        migrations={("moved", "ok"): 22},
        migration_buckets=(24,) * 14,
        migration_sum_seconds=0.5,
    )


def test_migrations_by_reason() -> None:
    migrations = {("moved", "ok"): 5, ("failed", "slow"): 2, ("failed", "denied"): 1, ("lost", "lost"): 1}
    assert traffic_model.migrations_by_reason(migrations, traffic_model.FAILED) == {"slow": 2, "denied": 1}
    assert traffic_model.migrations_by_reason(migrations, traffic_model.MOVED) == {"ok": 5}


def buckets(**counts: int) -> tuple[int, ...]:
    """Return cumulative buckets; for example, `b3=5` puts 5 values into the bucket with index 3."""
    single = [counts.get(f"b{index}", 0) for index in range(len(EMPTY_BUCKETS))]
    return tuple(sum(single[: index + 1]) for index in range(len(single)))


@pytest.mark.parametrize(
    ("share", "cumulative", "seconds"),
    [
        (0.5, EMPTY_BUCKETS, None),
        (0.5, buckets(b0=10), 0.00025),  # in the middle of the first bucket
        (1.0, buckets(b0=10), 0.0005),
        (0.5, buckets(b1=10), 0.00075),
        (0.75, buckets(b0=5, b1=5), 0.00075),
        (0.99, buckets(b0=50, b13=50), 10.0),  # values above the last bound are not known
        (0.5, buckets(b13=1), 10.0),
    ],
)
def test_quantile_is_interpolated_linearly(
    share: float, cumulative: tuple[int, ...], seconds: float | None
) -> None:
    assert quantile(share, cumulative) == (seconds if seconds is None else pytest.approx(seconds))


@given(st.lists(st.integers(0, 1000), min_size=14, max_size=14).filter(any), st.floats(0.0, 1.0))
def test_quantile_lies_in_the_bucket_that_reaches_the_share(counts: list[int], share: float) -> None:
    cumulative = buckets(**{f"b{index}": count for index, count in enumerate(counts)})
    value = quantile(share, cumulative)
    assert value is not None
    reached = next(index for index, count in enumerate(cumulative) if count >= share * cumulative[-1])
    assert value <= (
        LATENCY_BOUNDS_SECONDS[reached]
        if reached < len(LATENCY_BOUNDS_SECONDS)
        else LATENCY_BOUNDS_SECONDS[-1]
    )
    assert value >= (
        LATENCY_BOUNDS_SECONDS[min(reached, len(LATENCY_BOUNDS_SECONDS)) - 1] if reached else 0.0
    )


def test_filtered_report_has_no_ejections_of_other_nodes() -> None:
    ejections = {node: traffic_model.Ejection("one", "connect", 1.0) for node in ("a:1", "b:1")}
    report = traffic_model.ModuleReport("one", 1.0, ejections=ejections)
    assert dict(report.filtered({"a:1", ""}).ejections) == {"a:1": ejections["a:1"]}
    assert report.filtered({"a:1", "b:1", ""}) is report
