"""Topologies that PdObserver publishes while it cannot read the keys of a prefix."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from controlplane.config.settings import PdSettings
from controlplane.errors import PdError
from controlplane.etcd.types import Entry, KeyChange, RangeResult, WatchBatch
from controlplane.model.nodes import Topology
from controlplane.observe.discovery.pd_discovery import PdObserver
from controlplane.observe.discovery.pd_registrations import KEYSPACES_PREFIX, TIDB_PREFIX

INFO = json.dumps({"ip": "10.0.0.7", "status_port": 10080}).encode()
NODE_KEY = f"{TIDB_PREFIX}10.0.0.7:4000/info"


@pytest.fixture
def published() -> list[Topology]:
    return []


@pytest.fixture
def observer(published: list[Topology]) -> PdObserver:
    return PdObserver(PdSettings(urls=("http://127.0.0.1:1",)), published.append)


def listing(keys: Iterable[str] = ()) -> RangeResult:
    return RangeResult({key: Entry(INFO, 1) for key in keys}, 1)


def test_nodes_of_one_prefix_are_not_published_with_an_outage_of_the_other(
    observer: PdObserver, published: list[Topology]
) -> None:
    observer._apply(TIDB_PREFIX, listing([NODE_KEY]))
    observer._apply(KEYSPACES_PREFIX, PdError("no"))
    assert [(dict(topology.nodes), topology.outage) for topology in published] == [({}, "no")]
    # A server of another keyspace runs at the address of that node.
    observer._apply(KEYSPACES_PREFIX, listing([f"{KEYSPACES_PREFIX}other{TIDB_PREFIX}10.0.0.7:4000/ttl"]))
    assert (dict(published[-1].nodes), published[-1].outage) == ({}, "")
    assert published[-1].is_complete


def test_changes_during_an_outage_are_published_after_it(
    observer: PdObserver, published: list[Topology]
) -> None:
    observer._apply(TIDB_PREFIX, listing())
    observer._apply(KEYSPACES_PREFIX, listing())
    observer._apply(KEYSPACES_PREFIX, PdError("no"))
    observer._apply(TIDB_PREFIX, WatchBatch(2, (KeyChange(NODE_KEY, INFO, 2),)))
    observer._apply(KEYSPACES_PREFIX, PdError("never"))
    assert [(len(topology.nodes), topology.outage) for topology in published[1:]] == [(0, "no"), (0, "never")]
    observer._apply(KEYSPACES_PREFIX, WatchBatch(2))
    assert [(len(topology.nodes), topology.outage) for topology in published[3:]] == [(1, "")]


def test_outage_of_both_prefixes_is_published_once(observer: PdObserver, published: list[Topology]) -> None:
    for _ in range(3):
        for prefix in (TIDB_PREFIX, KEYSPACES_PREFIX):
            observer._apply(prefix, PdError(f"the watch on {prefix} was lost"))
    assert [topology.outage for topology in published] == [f"the watch on {TIDB_PREFIX} was lost"]
