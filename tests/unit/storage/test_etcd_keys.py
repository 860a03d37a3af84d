"""Records of replicas and their leader in PD, also malformed ones."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from controlplane.etcd.types import Entry
from controlplane.storage.etcd_keys import (
    EtcdKeys,
    LeaderRecord,
    ReplicaRecord,
    decode_leader,
    decode_replicas,
)

KEYS = EtcdKeys("/tidevoy/")


def test_decodes_leader() -> None:
    assert decode_leader(None) is None
    leader = LeaderRecord(name="a", lease="abc", since=3.5)
    assert json.loads(leader.encode()) == {"name": "a", "lease": "abc", "since": 3.5}
    assert decode_leader(Entry(leader.encode(), 7)) == leader.model_copy(update={"term": 7})


def test_decodes_only_replicas_with_address() -> None:
    a = ReplicaRecord(name="a", address="10.0.0.1:18000", version="0.1.0", since=3.5, instance="x")
    entries = {
        "/tidevoy/replicas/a": Entry(a.encode(), 1),
        "/tidevoy/replicas/b": Entry(b"{}", 2),
        "/tidevoy/replicas/c": Entry(b'{"address": ""}', 2),
        "/tidevoy/plan": Entry(a.encode(), 3),
    }
    assert decode_replicas(entries, KEYS) == {"a": a}


@given(st.binary() | st.sampled_from([b"[]", b"7", b'{"name": 7}', b'{"since": "x"}', b"[" * 10_000]))
def test_unreadable_leader_still_counts_as_leader(value: bytes) -> None:
    leader = decode_leader(Entry(value, 7))
    assert leader is not None
    assert leader.term == 7
    assert decode_replicas({"/tidevoy/replicas/a": Entry(value, 1)}, KEYS) == {}
