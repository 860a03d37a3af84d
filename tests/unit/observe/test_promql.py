"""PromQL queries, and parsing of Prometheus responses."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.observe.health.health_checker import CheckTarget
from controlplane.observe.node_metrics.promql import (
    addresses_by_name,
    build_queries,
    parse_vector,
)


def response_body(*named_values: tuple[str | None, str]) -> bytes:
    result = [
        {"metric": {"job": "tidb"} | ({"instance": name} if name is not None else {}), "value": [1.5, value]}
        for name, value in named_values
    ]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def test_queries_match_the_documentation() -> None:
    queries = build_queries({"job": "tidb", "cluster": 'a"b\\c'}, "pod")
    matchers = r'job="tidb",cluster="a\"b\\c"'
    pd_matchers, tikv_matchers = f'{matchers},type="tso"', f'{matchers},type="tikvRPC"'
    sums = {
        "cpu_seconds": f"process_cpu_seconds_total{{{matchers}}}",
        "cpu_quota": f"tidb_server_maxprocs{{{matchers}}}",
        "memory_bytes": f"process_resident_memory_bytes{{{matchers}}}",
        "memory_quota_bytes": f"tidb_server_memory_quota_bytes{{{matchers}}}",
        "pd_requests": f"pd_client_cmd_handle_cmds_duration_seconds_count{{{pd_matchers}}}",
        "pd_failures": f"pd_client_cmd_handle_failed_cmds_duration_seconds_count{{{pd_matchers}}}",
        "tikv_requests": f"tidb_tikvclient_request_seconds_count{{{matchers}}}",
        "tikv_failures": f"tidb_tikvclient_backoff_seconds_count{{{tikv_matchers}}}",
    }
    age = {"age": f"time() - timestamp(process_cpu_seconds_total{{{matchers}}})"}
    assert queries == age | {field: f"sum by (pod) ({selector})" for field, selector in sums.items()}


def test_values_are_returned_by_instance_label() -> None:
    body = response_body(("a:1", "0.5"), ("b:1", "1e3"))
    assert parse_vector(body, "instance") == ({"a:1": 0.5, "b:1": 1000.0}, 1.5)
    assert parse_vector(response_body(), "instance") == ({}, None)


def test_non_finite_and_unnamed_values_are_dropped() -> None:
    body = response_body(("a", "NaN"), ("b", "+Inf"), (None, "1"), ("c", "-2"))
    assert parse_vector(body, "instance").values == {"c": -2.0}


def test_names_that_two_series_share_are_dropped() -> None:
    body = response_body(("a", "1"), ("a", "2"), ("b", "3"))
    assert parse_vector(body, "instance").values == {"b": 3.0}


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
def test_rejects_responses_that_prometheus_never_sends(body: bytes) -> None:
    with pytest.raises(ValueError, match="not an instant vector"):
        parse_vector(body, "instance")


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
def test_any_json_is_parsed_or_rejected(document: object) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_vector(json.dumps(document).encode(), "instance").values, dict)


def target(address: str, status: str | None, status_host: str) -> CheckTarget:
    return CheckTarget(address, "10.0.0.1:4000", status, status_host)


def test_nodes_are_found_by_status_port_host_or_pod() -> None:
    pod = "basic-tidb-0.basic-tidb-peer.default.svc:4000"
    addresses = addresses_by_name(
        {
            "10.0.0.1:4000": target("10.0.0.1:4000", "10.0.0.1:10080", "10.0.0.1"),
            pod: target(pod, "10.0.0.2:10080", "basic-tidb-0.basic-tidb-peer.default.svc"),
            "[fd00::1]:4000": target("[fd00::1]:4000", "[fd00::1]:10080", "fd00::1"),
            "bare:4000": target("bare:4000", None, ""),
        }
    )
    assert addresses == {
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


def test_name_that_fits_two_nodes_is_ambiguous() -> None:
    first, second = "h:4000", "h:4001"
    addresses = addresses_by_name(
        {first: target(first, "10.0.0.1:10080", "h"), second: target(second, "10.0.0.1:10081", "h")}
    )
    assert addresses == {
        "h:10080": first,
        "10.0.0.1:10080": first,
        "h:10081": second,
        "10.0.0.1:10081": second,
    }
