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


def topology_of(registrations: PdRegistrations) -> Topology:
    return registrations.topology(is_complete=True, outage="")


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
        git_hash="abc",
        labels={"zone": "a"},
        started_at=1767225600.0,
        registered=False,
    )


def test_info_may_have_null_labels_ipv6_and_unknown_keys() -> None:
    node = parse_info("[fd00::1]:4000", info(labels=None, ip="fd00::1", future=[1]))
    assert (node.status_address, node.labels) == ("[fd00::1]:10080", {})


def test_only_ip_and_status_port_are_required() -> None:
    node = parse_info(NODE, b'{"ip": "tidb-0", "status_port": 1}')
    assert (node.status_address, node.version, node.started_at) == ("tidb-0:1", "", None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 60_000, "nested too deeply"),
        (b" " * 65_537, "has 65537 bytes"),
        (info(status_port="10080"), 'status_port is "10080"'),
        (info(status_port=True), "status_port is true"),
        (info(status_port=10080.0), "status_port is 10080.0"),
        (info(status_port=0), "status_port is 0, not a number from 1 to 65535"),
        (info(status_port=65536), "status_port is 65536"),
        (info(status_port=None), "status_port is null"),
        (b'{"ip": "10.0.0.7"}', "status_port is null"),
        (b'{"status_port": 1}', "ip is null, not a valid string"),
        (info(ip="a b"), "neither an IP address nor a host name"),
        (info(ip=""), "neither an IP address nor a host name"),
        (info(ip="[fd00::1]"), "neither an IP address nor a host name"),
        (info(version=8), "version is 8, not a valid string"),
        (info(git_hash=None), "git_hash is null, not a valid string"),
        (info(version="\ud800"), "version is .*, not a valid string"),
        (info(labels=[]), r"labels is \[\], not an object"),
        (info(labels={"zone": 1}), "zone is 1, not a valid string"),
        (info(labels={"zone": "\udfff"}), "zone is .*, not a valid string"),
        (info(labels={"\udfff": "a"}), "the name of a label is not a valid string"),
        (info(start_timestamp="now"), 'start_timestamp is "now", not a Unix time in seconds'),
        (info(start_timestamp=-1), "start_timestamp is -1"),
        (info(start_timestamp=10**400), r"start_timestamp is 1000+\.\.\., not a Unix time in seconds"),
        (info(start_timestamp=float("nan")), "not JSON"),
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
    assert len(topology_of(registrations).nodes) + len(topology_of(registrations).problems) == 1


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
        before = topology_of(incremental)
        has_changed = incremental.apply([KeyChange(name, value)])
        assert has_changed == (topology_of(incremental) != before)
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value
    listed = PdRegistrations("5")
    listed.replace(state)
    actual, expected = topology_of(incremental), topology_of(listed)
    # A listing does not contain the last valid values of entries that became invalid.
    assert expected.nodes.keys() <= actual.nodes.keys()
    assert (actual.other_keyspace, {problem.subject for problem in actual.problems}) == (
        expected.other_keyspace,
        {problem.subject for problem in expected.problems},
    )
    assert not listed.replace(state)
    assert incremental.replace({}) == (actual != Topology(Source.PD, is_complete=True))
    assert topology_of(incremental) == Topology(Source.PD, is_complete=True)


def test_node_is_registered_while_its_ttl_exists() -> None:
    registrations = PdRegistrations()
    assert not registrations.apply([put(field="ttl", value=b"1")])
    assert topology_of(registrations).nodes == {}
    assert registrations.apply([put()])
    assert topology_of(registrations).nodes[NODE].registered
    assert not registrations.apply([put(field="ttl", value=b"2"), put()])  # the refresh every 30 s
    assert registrations.apply([delete(field="ttl")])
    assert not topology_of(registrations).nodes[NODE].registered
    assert registrations.apply([delete()])
    assert topology_of(registrations).nodes == {}


def test_addresses_with_a_common_prefix_are_different_nodes() -> None:
    registrations = PdRegistrations()
    registrations.apply(
        [put("host:400"), put("host:4000"), put("host:4000", "ttl", b"1"), delete("host:400")]
    )
    assert list(topology_of(registrations).nodes) == ["host:4000"]


def test_published_topology_is_immutable() -> None:
    registrations = PdRegistrations()
    registrations.apply([put("a:1"), put("b:1", keyspace="5")])
    before = topology_of(registrations)
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
    assert (list(topology_of(registrations).nodes), topology_of(registrations).other_keyspace) == (
        nodes,
        other_keyspace,
    )


def test_address_used_in_another_keyspace_is_not_served() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(), put(keyspace="5")])
    assert list(topology_of(registrations).nodes) == [NODE]  # the other entry is outdated: it has no ttl
    registrations.apply([put(field="ttl", value=b"1", keyspace="5")])
    assert (topology_of(registrations).nodes, topology_of(registrations).other_keyspace) == ({}, {NODE: "5"})
    assert "a server of keyspace 5 runs at it too" in topology_of(registrations).problems[0].reason
    registrations.apply([delete(field="ttl", keyspace="5")])
    assert list(topology_of(registrations).nodes) == [NODE]
    assert topology_of(registrations).problems == ()


def test_entries_of_other_keyspaces_are_not_parsed() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(value=b"{", keyspace="5"), put("nonsense", keyspace="5")])
    assert (topology_of(registrations).other_keyspace, topology_of(registrations).problems) == (
        {NODE: "5"},
        (),
    )


def test_problems_appear_and_disappear_with_their_keys() -> None:
    registrations = PdRegistrations()
    assert registrations.apply([put("nonsense"), put("a:1", value=b"{"), put("b:1")])
    problems = topology_of(registrations).problems
    assert [problem.subject for problem in problems] == [key("a:1"), key("nonsense")]
    assert "not JSON" in problems[0].reason
    assert "has no port" in problems[1].reason
    assert list(topology_of(registrations).nodes) == ["b:1"]
    assert registrations.apply([delete("nonsense"), put("a:1")])
    assert topology_of(registrations).problems == ()
    assert sorted(topology_of(registrations).nodes) == ["a:1", "b:1"]


def test_node_with_invalid_new_entry_keeps_the_last_valid_one() -> None:
    registrations = PdRegistrations()
    registrations.apply([put(), put(field="ttl", value=b"1")])
    registrations.apply([put(value=b"{")])
    assert topology_of(registrations).nodes[NODE].version == "v8.5.3"
    assert "the last valid entry stays in effect" in topology_of(registrations).problems[0].reason
    registrations.apply([put(value=info(version="v9"))])
    assert (topology_of(registrations).nodes[NODE].version, topology_of(registrations).problems) == ("v9", ())


def test_listing_replaces_all_registrations() -> None:
    registrations = PdRegistrations()
    registrations.apply([put("a:1"), put("a:1", "ttl", b"1"), put("b:1"), put("nonsense")])
    assert registrations.replace({key("b:1"): info(), key("b:1", "ttl"): b"1"})
    topology = topology_of(registrations)
    assert (list(topology.nodes), topology.problems, topology.nodes["b:1"].registered) == (["b:1"], (), True)


def test_one_change_among_5000_nodes_is_fast() -> None:
    registrations = PdRegistrations()
    registrations.replace({key(f"tidb-{number}:4000"): info() for number in range(5000)})
    best = float("inf")
    for number in range(50):
        started_at = time.perf_counter()
        assert registrations.apply([put(f"tidb-{number}:4000", value=info(version="v9"))])
        assert len(topology_of(registrations).nodes) == 5000
        best = min(best, time.perf_counter() - started_at)
    assert best < 0.002  # parsing all of them takes about 100 ms


def test_addresses_are_normalized() -> None:
    assert (
        parse_address_field("[FD00:0::1]:4000/info")
        == parse_address_field("[fd00::1]:4000/info")
        == ("[fd00::1]:4000", "info")
    )
