"""Keys and values of the topology in PD, and how the registry folds them."""

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
    above = f"/keyspaces/tidb/{keyspace}" if keyspace else ""
    return f"{above}/topology/tidb/{address}/{field}"


def put(
    address: str = NODE, field: str = "info", value: bytes | None = None, keyspace: str = ""
) -> KeyChange:
    return KeyChange(key(address, field, keyspace), info() if value is None else value)


def delete(address: str = NODE, field: str = "info", keyspace: str = "") -> KeyChange:
    return KeyChange(key(address, field, keyspace), None)


def shown(registry: PdRegistrations) -> Topology:
    return registry.topology(is_complete=True, outage="")


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
def test_keys_are_located(text: str, expected: tuple[str, str] | None) -> None:
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
def test_leaves_are_parsed(rest: str, expected: tuple[str, str]) -> None:
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
def test_bad_leaves_are_refused(rest: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address_field(rest)


def test_an_info_is_a_node() -> None:
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


def test_an_info_may_lack_labels_and_have_ipv6_and_unknown_keys() -> None:
    node = parse_info("[fd00::1]:4000", info(labels=None, ip="fd00::1", future=[1]))
    assert (node.status_address, node.labels) == ("[fd00::1]:10080", {})


def test_only_ip_and_status_port_are_needed() -> None:
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
        (b'{"status_port": 1}', "ip is null, not a text"),
        (info(ip="a b"), "neither an IP address nor a host name"),
        (info(ip=""), "neither an IP address nor a host name"),
        (info(ip="[fd00::1]"), "neither an IP address nor a host name"),
        (info(version=8), "version is 8, not a text"),
        (info(git_hash=None), "git_hash is null, not a text"),
        (info(version="\ud800"), "version is .*, not a text"),
        (info(labels=[]), r"labels is \[\], not an object"),
        (info(labels={"zone": 1}), "zone is 1, not a text"),
        (info(labels={"zone": "\udfff"}), "zone is .*, not a text"),
        (info(labels={"\udfff": "a"}), "the name of a label is not a text"),
        (info(start_timestamp="now"), 'start_timestamp is "now", not Unix seconds'),
        (info(start_timestamp=-1), "start_timestamp is -1"),
        (info(start_timestamp=10**400), r"start_timestamp is 1000+\.\.\., not Unix seconds"),
        (info(start_timestamp=float("nan")), "not JSON"),
    ],
)
def test_a_bad_info_is_told(value: bytes, reason: str) -> None:
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
def test_no_value_does_more_than_be_refused(value: bytes) -> None:
    registry = PdRegistrations()
    registry.apply([put(value=value)])
    assert len(shown(registry).nodes) + len(shown(registry).problems) == 1


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
def test_change_by_change_is_as_listed(script: list[tuple[str, str, str, bytes | None]]) -> None:
    step_by_step, state = PdRegistrations("5"), dict[str, bytes]()
    for keyspace, address, field, value in script:
        name = key(address, field, keyspace)
        before = shown(step_by_step)
        different = step_by_step.apply([KeyChange(name, value)])
        assert different == (shown(step_by_step) != before)
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value
    listed = PdRegistrations("5")
    listed.replace(state)
    now, then = shown(step_by_step), shown(listed)
    # What a listing cannot know is what an entry said before it became unreadable.
    assert then.nodes.keys() <= now.nodes.keys()
    assert (now.other_keyspace, {problem.subject for problem in now.problems}) == (
        then.other_keyspace,
        {problem.subject for problem in then.problems},
    )
    assert not listed.replace(state)
    assert step_by_step.replace({}) == (now != Topology(Source.PD, is_complete=True))
    assert shown(step_by_step) == Topology(Source.PD, is_complete=True)


def test_a_node_is_registered_while_its_ttl_is_there() -> None:
    registry = PdRegistrations()
    assert not registry.apply([put(field="ttl", value=b"1")])
    assert shown(registry).nodes == {}
    assert registry.apply([put()])
    assert shown(registry).nodes[NODE].registered
    assert not registry.apply([put(field="ttl", value=b"2"), put()])  # the refresh of each 30 s
    assert registry.apply([delete(field="ttl")])
    assert not shown(registry).nodes[NODE].registered
    assert registry.apply([delete()])
    assert shown(registry).nodes == {}


def test_addresses_that_begin_alike_are_different_nodes() -> None:
    registry = PdRegistrations()
    registry.apply([put("host:400"), put("host:4000"), put("host:4000", "ttl", b"1"), delete("host:400")])
    assert list(shown(registry).nodes) == ["host:4000"]


def test_a_published_topology_does_not_change_any_more() -> None:
    registry = PdRegistrations()
    registry.apply([put("a:1"), put("b:1", keyspace="5")])
    before = shown(registry)
    registry.apply([put("c:1"), delete("a:1"), delete("b:1", keyspace="5"), put("x", value=b"")])
    assert (list(before.nodes), dict(before.other_keyspace), before.problems) == (["a:1"], {"b:1": "5"}, ())


@pytest.mark.parametrize(
    ("served", "nodes", "foreign"),
    [
        ("", ["a:1"], {"b:1": "5", "c:1": "6"}),
        ("5", ["b:1"], {"a:1": "", "c:1": "6"}),
        ("7", [], {"a:1": "", "b:1": "5", "c:1": "6"}),
    ],
)
def test_one_keyspace_is_served_and_others_are_named(
    served: str, nodes: list[str], foreign: dict[str, str]
) -> None:
    registry = PdRegistrations(served)
    registry.apply([put("a:1"), put("b:1", keyspace="5"), put("c:1", keyspace="6")])
    assert (list(shown(registry).nodes), shown(registry).other_keyspace) == (nodes, foreign)


def test_an_address_that_lives_in_another_keyspace_is_not_served() -> None:
    registry = PdRegistrations()
    registry.apply([put(), put(keyspace="5")])
    assert list(shown(registry).nodes) == [NODE]  # the other entry is a leftover: nobody vouches for it
    registry.apply([put(field="ttl", value=b"1", keyspace="5")])
    assert (shown(registry).nodes, shown(registry).other_keyspace) == ({}, {NODE: "5"})
    assert "a server of keyspace 5 lives there" in shown(registry).problems[0].reason
    registry.apply([delete(field="ttl", keyspace="5")])
    assert list(shown(registry).nodes) == [NODE]
    assert shown(registry).problems == ()


def test_foreign_entries_are_not_read() -> None:
    registry = PdRegistrations()
    registry.apply([put(value=b"{", keyspace="5"), put("nonsense", keyspace="5")])
    assert (shown(registry).other_keyspace, shown(registry).problems) == ({NODE: "5"}, ())


def test_problems_come_and_go_with_their_keys() -> None:
    registry = PdRegistrations()
    assert registry.apply([put("nonsense"), put("a:1", value=b"{"), put("b:1")])
    problems = shown(registry).problems
    assert [problem.subject for problem in problems] == [key("a:1"), key("nonsense")]
    assert "not JSON" in problems[0].reason
    assert "has no port" in problems[1].reason
    assert list(shown(registry).nodes) == ["b:1"]
    assert registry.apply([delete("nonsense"), put("a:1")])
    assert shown(registry).problems == ()
    assert sorted(shown(registry).nodes) == ["a:1", "b:1"]


def test_a_node_whose_entry_becomes_unreadable_stays_what_it_was() -> None:
    registry = PdRegistrations()
    registry.apply([put(), put(field="ttl", value=b"1")])
    registry.apply([put(value=b"{")])
    assert shown(registry).nodes[NODE].version == "v8.5.3"
    assert "what it said before stays in force" in shown(registry).problems[0].reason
    registry.apply([put(value=info(version="v9"))])
    assert (shown(registry).nodes[NODE].version, shown(registry).problems) == ("v9", ())


def test_a_listing_replaces_what_was_known() -> None:
    registry = PdRegistrations()
    registry.apply([put("a:1"), put("a:1", "ttl", b"1"), put("b:1"), put("nonsense")])
    assert registry.replace({key("b:1"): info(), key("b:1", "ttl"): b"1"})
    topology = shown(registry)
    assert (list(topology.nodes), topology.problems, topology.nodes["b:1"].registered) == (["b:1"], (), True)


def test_one_change_among_5000_nodes_is_cheap() -> None:
    registry = PdRegistrations()
    registry.replace({key(f"tidb-{number}:4000"): info() for number in range(5000)})
    best = float("inf")
    for number in range(50):
        begun = time.perf_counter()
        assert registry.apply([put(f"tidb-{number}:4000", value=info(version="v9"))])
        assert len(shown(registry).nodes) == 5000
        best = min(best, time.perf_counter() - begun)
    assert best < 0.002  # parsing all of them takes some 100 ms


def test_an_address_is_the_same_however_it_is_spelt() -> None:
    assert (
        parse_address_field("[FD00:0::1]:4000/info")
        == parse_address_field("[fd00::1]:4000/info")
        == ("[fd00::1]:4000", "info")
    )
