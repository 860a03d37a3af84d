"""Parsing of PD's topology keys and values, and their combination into a topology."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.etcd.types import KeyChange
from controlplane.model.nodes import Node, Source, Topology
from controlplane.observe.discovery.pd_registrations import (
    PdRegistrations,
    parse_address_field,
    parse_info,
    parse_key,
)

NODE = "10.0.0.7:4000"
INFO = {
    "version": "v8.5.3",
    "git_hash": "abc",
    "ip": "10.0.0.7",
    "status_port": 10080,
    "deploy_path": "/data/tidb/bin",
    "start_timestamp": 1767225600,
    "labels": {"zone": "a"},
}


def info(**changes: Any) -> bytes:
    return json.dumps({**INFO, **changes}).encode()


def key(address: str = NODE, field: str = "info", keyspace: str = "") -> str:
    prefix = f"/keyspaces/tidb/{keyspace}" if keyspace else ""
    return f"{prefix}/topology/tidb/{address}/{field}"


def put(
    address: str = NODE, field: str = "info", value: bytes | None = None, keyspace: str = ""
) -> KeyChange:
    return KeyChange(key(address, field, keyspace), info() if value is None else value)


def delete(address: str = NODE, field: str = "info", keyspace: str = "") -> KeyChange:
    return KeyChange(key(address, field, keyspace), None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/topology/tidb/10.0.0.7:4000/info", ("", "10.0.0.7:4000/info")),
        ("/topology/tidb/", ("", "")),
        ("/keyspaces/tidb/5/topology/tidb/10.0.0.7:4000/ttl", ("5", "10.0.0.7:4000/ttl")),
        ("/keyspaces/tidb/5/topology/tiproxy/10.0.0.7:6000/ttl", None),
        ("/keyspaces/tidb/5/tidb/server/info/1-2-3", None),
        ("/keyspaces/tidb/5/x/topology/tidb/10.0.0.7:4000/ttl", None),
        ("/keyspaces/tidb//topology/tidb/10.0.0.7:4000/info", None),
        ("/keyspaces/tidb/topology/tidb/10.0.0.7:4000/info", None),
        ("/keyspaces/tidb/5", None),
        ("/topology/tidb", None),
        ("/topology/tikv/10.0.0.7:20160/info", None),
        ("", None),
    ],
)
def test_keys_are_parsed(text: str, expected: tuple[str, str] | None) -> None:
    assert parse_key(text) == expected


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("10.0.0.7:4000/info", ("10.0.0.7:4000", "info")),
        ("[fd00::1]:4000/ttl", ("[fd00::1]:4000", "ttl")),
        ("[FD00:0::1]:4000/info", ("[fd00::1]:4000", "info")),
        ("tidb-0.tidb-peer.ns.svc:4000/info", ("tidb-0.tidb-peer.ns.svc:4000", "info")),
        ("10.0.0.7:400/info", ("10.0.0.7:400", "info")),
    ],
)
def test_address_and_field_are_parsed(rest: str, expected: tuple[str, str]) -> None:
    assert parse_address_field(rest) == expected


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("", "does not end in /info or /ttl"),
        ("10.0.0.7:4000", "does not end in /info or /ttl"),
        ("10.0.0.7/info", "has no port"),
        ("10.0.0.7:0/info", "is not a number from 1 to 65535"),
        ("10.0.0.7:65536/info", "is not a number from 1 to 65535"),
        ("10.0.0.7:4000/sub/info", "is not a number from 1 to 65535"),
        ("fd00::1:4000/info", "is ambiguous"),
        (":4000/info", "neither an IP address nor a host name"),
        ("a\\xff:4000/info", "neither an IP address nor a host name"),
    ],
)
def test_rejects_invalid_address_or_field(rest: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address_field(rest)


def test_info_is_parsed_as_node() -> None:
    assert parse_info(NODE, info()) == Node(
        address=NODE,
        source=Source.PD,
        status_address="10.0.0.7:10080",
        version="v8.5.3",
        labels={"zone": "a"},
        started_at=1767225600.0,
        registered=False,
    )


def test_info_may_have_null_labels_ipv6_and_any_value_in_unused_fields() -> None:
    node = parse_info("[fd00::1]:4000", info(labels=None, ip="fd00::1", git_hash=None, future=[1]))
    assert (node.status_address, node.labels) == ("[fd00::1]:10080", {})


def test_only_ip_and_status_port_are_required() -> None:
    node = parse_info(NODE, b'{"ip": "tidb-0", "status_port": 1}')
    assert (node.status_address, node.version, node.started_at) == ("tidb-0:1", "", None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "the value is invalid: Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"\xff\xfe{}", "Invalid JSON"),
        (b"[]", "the value is invalid: Input should be an object"),
        (b"null", "should be an object"),
        (b"[" * 60_000, "Invalid JSON: recursion limit exceeded"),
        (b" " * 65_537, "has 65537 bytes"),
        (info(status_port="10080"), "status_port is invalid: .* valid integer"),
        (info(status_port=True), "status_port is invalid"),
        (info(status_port=10080.0), "status_port is invalid"),
        (info(status_port=0), "status_port is invalid: .* greater than or equal to 1"),
        (info(status_port=65536), "status_port is invalid: .* less than or equal to 65535"),
        (info(status_port=None), "status_port is invalid"),
        (b'{"ip": "10.0.0.7"}', "status_port is invalid: Field required"),
        (b'{"status_port": 1}', "ip is invalid: Field required"),
        (info(ip="a b"), "ip is 'a b', neither an IP address nor a host name"),
        (info(ip=""), "neither an IP address nor a host name"),
        (info(ip="[fd00::1]"), "neither an IP address nor a host name"),
        (info(version=8), "version is invalid: .* valid string"),
        (info(version="\ud800"), "Invalid JSON"),
        (info(labels=[]), "labels is invalid: Input should be an object"),
        (info(labels={"zone": 1}), "labels.zone is invalid: .* valid string"),
        (info(labels={"zone": "\udfff"}), "Invalid JSON"),
        (info(labels={"\udfff": "a"}), "Invalid JSON"),
        (info(start_timestamp="now"), "start_timestamp is invalid: .* valid number"),
        (info(start_timestamp=True), "start_timestamp is invalid"),
        (info(start_timestamp=-1), "start_timestamp is invalid"),
        (info(start_timestamp=10**400), "start_timestamp is invalid"),
        (info(start_timestamp=float("nan")), "start_timestamp is invalid"),
    ],
)
def test_rejects_invalid_info(value: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_info(NODE, value)


@given(
    st.one_of(
        st.binary(),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(INFO)), inner),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_value_is_a_node_or_a_problem(value: bytes) -> None:
    registrations = PdRegistrations()
    registrations.apply([put(value=value)])
    assert len(registrations.topology().nodes) + len(registrations.topology().problems) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "5", "6"]),
            st.sampled_from(["a:1", "b:1", "nonsense"]),
            st.sampled_from(["info", "ttl", "other"]),
            st.sampled_from([None, info(), info(version="v9"), b"{"]),
        )
    )
)
def test_incremental_changes_match_a_listing(changes: list[tuple[str, str, str, bytes | None]]) -> None:
    incremental, state = PdRegistrations("5"), dict[str, bytes]()
    for keyspace, address, field, value in changes:
        name = key(address, field, keyspace)
        before = incremental.topology()
        has_changed = incremental.apply([KeyChange(name, value)])
        assert has_changed == (incremental.topology() != before)
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value
    listed = PdRegistrations("5")
    listed.replace_prefix(state)
    actual, expected = incremental.topology(), listed.topology()
    # A listing does not contain the last valid values of entries that became invalid.
    assert expected.nodes.keys() <= actual.nodes.keys()
    assert (actual.other_keyspace, {problem.subject for problem in actual.problems}) == (
        expected.other_keyspace,
        {problem.subject for problem in expected.problems},
    )
    assert not listed.replace_prefix(state)
    assert incremental.replace_prefix({}) == (actual != Topology(Source.PD, is_complete=True))
    assert incremental.topology() == Topology(Source.PD, is_complete=True)


def test_node_is_registered_while_its_ttl_exists() -> None:
    registrations = PdRegistrations()
    assert not registrations.apply([put(field="ttl", value=b"1")])
    assert registrations.topology().nodes == {}
    assert registrations.apply([put()])
    assert registrations.topology().nodes[NODE].registered
    assert not registrations.apply([put(field="ttl", value=b"2"), put()])  # a periodic refresh of both keys
    assert registrations.apply([delete(field="ttl")])
    assert not registrations.topology().nodes[NODE].registered
    assert registrations.apply([delete()])
    assert registrations.topology().nodes == {}


def test_addresses_with_a_common_prefix_are_different_nodes() -> None:
    registrations = PdRegistrations()
    registrations.apply(
        [put("host:400"), put("host:4000"), put("host:4000", "ttl", b"1"), delete("host:400")]
    )
    assert list(registrations.topology().nodes) == ["host:4000"]


def test_published_topology_is_immutable() -> None:
    registrations = PdRegistrations()
    registrations.apply([put("a:1"), put("b:1", keyspace="5")])
    before = registrations.topology()
    registrations.apply([put("c:1"), delete("a:1"), delete("b:1", keyspace="5"), put("x", value=b"")])
    assert (list(before.nodes), dict(before.other_keyspace), before.problems) == (["a:1"], {"b:1": "5"}, ())


@pytest.mark.parametrize(
    ("served", "nodes", "other_keyspace"),
    [
        ("", ["a:1"], {"b:1": "5", "c:1": "6"}),
        ("5", ["b:1"], {"a:1": "", "c:1": "6"}),
        ("7", [], {"a:1": "", "b:1": "5", "c:1": "6"}),
    ],
)
def test_one_keyspace_is_served_and_others_are_listed(
    served: str, nodes: list[str], other_keyspace: dict[str, str]
) -> None:
    registrations = PdRegistrations(served)
    registrations.apply([put("a:1"), put("b:1", keyspace="5"), put("c:1", keyspace="6")])
    assert (list(registrations.topology().nodes), registrations.topology().other_keyspace) == (
        nodes,
        other_keyspace,
    )


def test_address_used_in_another_keyspace_is_not_served() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(), put(keyspace="5")])
    assert list(registrations.topology().nodes) == [NODE]  # the other entry is outdated: it has no ttl
    registrations.apply([put(field="ttl", value=b"1", keyspace="5")])
    assert (registrations.topology().nodes, registrations.topology().other_keyspace) == ({}, {NODE: "5"})
    assert "a server of keyspace 5 runs at it too" in registrations.topology().problems[0].reason
    registrations.apply([delete(field="ttl", keyspace="5")])
    assert list(registrations.topology().nodes) == [NODE]
    assert registrations.topology().problems == ()


def test_entries_of_other_keyspaces_are_not_parsed() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(value=b"{", keyspace="5"), put("nonsense", keyspace="5")])
    assert (registrations.topology().other_keyspace, registrations.topology().problems) == (
        {NODE: "5"},
        (),
    )


def test_problems_appear_and_disappear_with_their_keys() -> None:
    registrations = PdRegistrations()
    assert registrations.apply([put("nonsense"), put("a:1", value=b"{"), put("b:1")])
    problems = registrations.topology().problems
    assert [problem.subject for problem in problems] == [key("a:1"), key("nonsense")]
    assert "Invalid JSON" in problems[0].reason
    assert "has no port" in problems[1].reason
    assert list(registrations.topology().nodes) == ["b:1"]
    assert registrations.apply([delete("nonsense"), put("a:1")])
    assert registrations.topology().problems == ()
    assert sorted(registrations.topology().nodes) == ["a:1", "b:1"]


def test_node_with_invalid_new_entry_keeps_the_last_valid_one() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(), put(field="ttl", value=b"1")])
    registrations.apply([put(value=b"{")])
    assert registrations.topology().nodes[NODE].version == "v8.5.3"
    assert "the last valid entry stays in effect" in registrations.topology().problems[0].reason
    registrations.apply([put(value=info(version="v9"))])
    assert (registrations.topology().nodes[NODE].version, registrations.topology().problems) == ("v9", ())


def test_listing_replaces_all_registrations() -> None:
    registrations = PdRegistrations()
    registrations.apply([put("a:1"), put("a:1", "ttl", b"1"), put("b:1"), put("nonsense")])
    assert registrations.replace_prefix({key("b:1"): info(), key("b:1", "ttl"): b"1"})
    topology = registrations.topology()
    assert (list(topology.nodes), topology.problems, topology.nodes["b:1"].registered) == (["b:1"], (), True)


def test_one_change_among_5000_nodes_is_fast() -> None:
    registrations = PdRegistrations()
    registrations.replace_prefix({key(f"tidb-{number}:4000"): info() for number in range(5000)})
    best = float("inf")
    for number in range(50):
        started_at = time.perf_counter()
        assert registrations.apply([put(f"tidb-{number}:4000", value=info(version="v9"))])
        assert len(registrations.topology().nodes) == 5000
        best = min(best, time.perf_counter() - started_at)
    assert best < 0.002  # parsing all nodes takes about 100 ms
