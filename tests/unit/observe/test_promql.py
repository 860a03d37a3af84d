"""What is asked of a Prometheus, and what its answers mean."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics.promql import (
    AGE_QUERY,
    InvalidPrometheusResponse,
    addresses_by_name,
    build_queries,
    node_metrics_by_name,
    parse_values,
)


def answer(*named: tuple[str | None, str]) -> bytes:
    result = [
        {"metric": {"job": "tidb"} | ({"instance": name} if name is not None else {}), "value": [1.5, value]}
        for name, value in named
    ]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def test_the_queries_are_those_of_the_documentation() -> None:
    asked = build_queries({"job": "tidb", "cluster": 'a"b\\c'}, "pod")
    chosen = r'job="tidb",cluster="a\"b\\c"'
    assert asked == {
        "age": f"time() - timestamp(process_cpu_seconds_total{{{chosen}}})",
        "cpu_seconds": f"irate(process_cpu_seconds_total{{{chosen}}}[2m])",
        "cpu_quota": f"tidb_server_maxprocs{{{chosen}}}",
        "memory_bytes": f"process_resident_memory_bytes{{{chosen}}}",
        "memory_quota_bytes": f"tidb_server_memory_quota_bytes{{{chosen}}}",
        "growth": f"deriv(process_resident_memory_bytes{{{chosen}}}[1m])",
        "pd_requests": "sum by (pod) (increase("
        f'pd_client_cmd_handle_cmds_duration_seconds_count{{{chosen},type="tso"}}[2m]))',
        "pd_failures": "sum by (pod) (increase("
        f'pd_client_cmd_handle_failed_cmds_duration_seconds_count{{{chosen},type="tso"}}[2m]))',
        "tikv_requests": f"sum by (pod) (increase(tidb_tikvclient_request_seconds_count{{{chosen}}}[2m]))",
        "tikv_failures": "sum by (pod) (increase("
        f'tidb_tikvclient_backoff_seconds_count{{{chosen},type="tikvRPC"}}[2m]))',
    }


def test_values_are_read_by_what_names_the_node() -> None:
    assert parse_values(answer(("a:1", "0.5"), ("b:1", "1e3")), "instance") == {"a:1": 0.5, "b:1": 1000.0}
    assert parse_values(answer(), "instance") == {}


def test_a_value_that_is_no_number_or_has_no_name_is_left_out() -> None:
    told = answer(("a", "NaN"), ("b", "+Inf"), (None, "1"), ("c", "-2"))
    assert parse_values(told, "instance") == {"c": -2.0}


def test_what_two_series_name_alike_is_left_out() -> None:
    assert parse_values(answer(("a", "1"), ("a", "2"), ("b", "3")), "instance") == {"b": 3.0}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data": {"resultType": "vector", "result": 7}}',
        b'{"data": {"resultType": "scalar", "result": [1, "2"]}}',
        b'{"data": {"resultType": "vector", "result": [{"metric": {}}]}}',
        b'{"data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "x"]}]}}',
        b'{"data": {"resultType": "vector", "result": [{"metric": [], "value": [1, "1"]}]}}',
        b'{"data": {"resultType": "vector", "result": [{"metric": {"instance": []}, "value": [1, "1"]}]}}',
        b'{"data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, 1%s]}]}}' % (b"0" * 400),
        b"[" * 100_000,
    ],
)
def test_what_prometheus_never_answers_is_told(body: bytes) -> None:
    with pytest.raises(InvalidPrometheusResponse, match="not as Prometheus does"):
        parse_values(body, "instance")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(["vector", "1"]),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["data", "result", "resultType", "metric", "value", "instance"]), inner
        )
    ),
)


@settings(max_examples=50)
@given(JSON)
def test_whatever_is_answered_is_read_or_told(told: object) -> None:
    with contextlib.suppress(InvalidPrometheusResponse):
        assert isinstance(parse_values(json.dumps(told).encode(), "instance"), dict)


def test_vital_signs_are_as_old_as_prometheus_says() -> None:
    found = node_metrics_by_name(
        {
            AGE_QUERY: {"a": 12.5, "b": -0.5},
            "cpu_seconds": {"a": 3.0, "stranger": 1.0},
            "cpu_quota": {"a": 4.0, "b": 8.0},
            "memory_bytes": {"a": 50.0, "b": 50.0},
            "memory_quota_bytes": {"a": 100.0, "b": 0.0},
            "growth": {"a": -1.0, "b": 1.0},
            "pd_requests": {"a": 10.0},
            "pd_failures": {"a": 5.0, "b": 1.0},
            "tikv_requests": {"a": 0.0},
            "tikv_failures": {"a": 2.0},
        },
        now=1000.0,
    )
    at = 987.5
    assert found == {
        "a": NodeMetrics(
            MetricValue(0.75, at),
            4.0,
            MetricValue(0.5, at),
            -0.01,
            MetricValue(0.5, at),
            MetricValue(1.0, at),
        ),
        "b": NodeMetrics(cpu_quota=8.0),
    }


def target(address: str, status: str | None, status_host: str) -> CheckTarget:
    return CheckTarget(address, "10.0.0.1:4000", status, status_host)


def test_a_node_is_named_by_its_status_port_its_host_or_its_pod() -> None:
    pod = "basic-tidb-0.basic-tidb-peer.default.svc:4000"
    found = addresses_by_name(
        {
            "10.0.0.1:4000": target("10.0.0.1:4000", "10.0.0.1:10080", "10.0.0.1"),
            pod: target(pod, "10.0.0.2:10080", "basic-tidb-0.basic-tidb-peer.default.svc"),
            "[fd00::1]:4000": target("[fd00::1]:4000", "[fd00::1]:10080", "fd00::1"),
            "bare:4000": target("bare:4000", None, ""),
        }
    )
    assert found == {
        "10.0.0.1:10080": "10.0.0.1:4000",
        "10.0.0.1": "10.0.0.1:4000",
        "10.0.0.2:10080": pod,
        "basic-tidb-0.basic-tidb-peer.default.svc:10080": pod,
        "basic-tidb-0.basic-tidb-peer.default.svc": pod,
        "basic-tidb-0": pod,
        "[fd00::1]:10080": "[fd00::1]:4000",
        "fd00::1": "[fd00::1]:4000",
        "bare": "bare:4000",
    }


def test_what_names_two_nodes_names_none() -> None:
    one, other = "h:4000", "h:4001"
    found = addresses_by_name(
        {one: target(one, "10.0.0.1:10080", "h"), other: target(other, "10.0.0.1:10081", "h")}
    )
    assert found == {"h:10080": one, "10.0.0.1:10080": one, "h:10081": other, "10.0.0.1:10081": other}
