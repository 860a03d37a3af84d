"""Discovery against real etcd: servers come and go, PD members die, hang, forget, and are found again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from controlplane.config.settings import ClientTls, PdSettings
from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import Topology
from controlplane.observe.discovery.pd_discovery import PdObserver
from sandbox.etcd import Etcd, EtcdCluster, EtcdPorts, EtcdTls
from sandbox.ports import Ports
from tests.support.controlplane.etcd_compaction import compact

NODE = "10.0.0.7:4000"


def info(**changes: Any) -> bytes:
    entry = {
        "version": "v8.5.3",
        "git_hash": "abc",
        "ip": "10.0.0.7",
        "status_port": 10080,
        "deploy_path": "/data/tidb/bin",
        "start_timestamp": 1767225600,
        "labels": None,
    }
    return json.dumps({**entry, **changes}).encode()


def key(address: str, field: str = "info", keyspace: str = "") -> str:
    above = f"/keyspaces/tidb/{keyspace}" if keyspace else ""
    return f"{above}/topology/tidb/{address}/{field}"


async def register(client: EtcdClient, address: str, *, lease: int = 0, keyspace: str = "") -> None:
    """What a TiDB server does when it starts."""
    await client.put(key(address, "info", keyspace), info())
    await client.put(key(address, "ttl", keyspace), b"1767225630123456789", lease)


class Watcher:
    """All that an observer published, and waiting for what it will."""

    def __init__(self) -> None:
        self.published: list[Topology] = []
        self.times: list[float] = []
        self._news = asyncio.Event()

    def publish(self, topology: Topology) -> None:
        self.published.append(topology)
        self.times.append(time.perf_counter())
        self._news.set()

    @property
    def latest(self) -> Topology:
        return self.published[-1]

    async def until(self, holds: Callable[[Topology], bool], within: float = 15.0) -> Topology:
        """The first published topology, the latest included, for which `holds` is true."""
        async with asyncio.timeout(within):
            while not (self.published and holds(self.latest)):
                self._news.clear()
                await self._news.wait()
        return self.latest

    async def until_nodes(self, *addresses: str) -> Topology:
        return await self.until(lambda topology: sorted(topology.nodes) == sorted(addresses))


@asynccontextmanager
async def observing(*urls: str, **settings: Any) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    observer = PdObserver(PdSettings(urls=urls, **settings), watcher.publish)
    running = asyncio.create_task(observer.run())
    try:
        yield watcher
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()


async def compact_all(etcd: Etcd) -> None:
    """Make etcd forget all changes, as PD's does once an hour."""
    async with EtcdClient([etcd.url]) as client:
        revision = await client.put("/x", b"")
    await compact(etcd, revision)


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as connected:
        yield connected


async def test_a_server_comes_dies_and_is_removed(etcd: Etcd, client: EtcdClient) -> None:
    async with observing(etcd.url) as watcher:
        assert await watcher.until(lambda topology: topology.is_complete) == Topology(
            watcher.latest.source, is_complete=True
        )
        lease = await client.lease_grant(2)
        await register(client, NODE, lease=lease)
        node = (
            await watcher.until(lambda topology: bool(topology.nodes) and topology.nodes[NODE].registered)
        ).nodes[NODE]
        assert (node.status_address, node.version, node.started_at) == (
            "10.0.0.7:10080",
            "v8.5.3",
            1767225600.0,
        )
        # It is killed: its lease runs out, and `info` stays.
        await watcher.until(lambda topology: not topology.nodes[NODE].registered)
        await client.delete("/topology/tidb/10.0.0.7:400", prefix=True)  # as TiDB does: no slash at the end
        await watcher.until_nodes()
        assert [len(topology.nodes) for topology in watcher.published] == [0, 1, 1, 1, 0]


async def test_what_was_there_before_is_listed_at_once(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    await register(client, "[fd00::7]:4000")
    await register(client, "tidb-0.tidb-peer:4000")
    await client.put("/topology/tiproxy/10.0.0.9:6000/info", b"{}")
    async with observing(etcd.url) as watcher:
        topology = await watcher.until(lambda topology: True)
    assert sorted(topology.nodes) == sorted([NODE, "[fd00::7]:4000", "tidb-0.tidb-peer:4000"])
    assert (topology.is_complete, topology.outage, topology.problems) == (True, "", ())


async def test_a_put_is_published_in_about_a_millisecond(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE)
        delays = []
        for number in range(100):
            version, known = f"v{number}", len(watcher.published)
            begun = time.perf_counter()
            await client.put(key(NODE), info(version=version))
            await watcher.until(lambda topology, version=version: topology.nodes[NODE].version == version)  # type: ignore[misc]
            delays.append(watcher.times[known] - begun)
        assert len(watcher.published) == known + 1  # one publication a change
    # From before the put: etcd has to write it to disk, too, before anybody may hear of it.
    assert statistics.median(delays) < 0.02


async def test_refreshes_publish_nothing(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE)
        known = len(watcher.published)
        for number in range(5):
            await client.put(key(NODE), info())
            await client.put(key(NODE, "ttl"), b"%d" % number)
        await register(client, "10.0.0.8:4000")
        await watcher.until(
            lambda topology: len(topology.nodes) == 2 and topology.nodes["10.0.0.8:4000"].registered
        )
        # At most once for `info` and once for `ttl` of the new one, nothing for the other.
        assert len(watcher.published) <= known + 2


async def test_malformed_entries_are_told_and_harm_no_other(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    bad = {
        key("10.0.0.8:4000"): b"{",
        key("10.0.0.9:4000"): info(status_port=70000),
        key("10.0.0.10:4000"): b"\xff\xfe",
        key("10.0.0.11:4000"): b'{"x":"' + b"x" * 1_000_000 + b'"}',
        key("no-port"): info(),
        "/topology/tidb/stray": b"",
    }
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE)
        for name, value in bad.items():
            await client.put(name, value)
        await client.put(key("10.0.0.12:4000", "ttl"), b"1")  # without info: nothing yet
        topology = await watcher.until(lambda topology: len(topology.problems) == len(bad))
        assert {problem.subject for problem in topology.problems} == set(bad)
        assert list(topology.nodes) == [NODE]
        await client.put(key("10.0.0.8:4000"), info())
        await watcher.until_nodes(NODE, "10.0.0.8:4000")
        await client.delete("/topology/tidb/", prefix=True)
        assert (await watcher.until_nodes()).problems == ()


@pytest.mark.parametrize(("keyspace", "served"), [(None, NODE), ("5", "10.0.0.8:4000")])
async def test_one_keyspace_is_served(
    etcd: Etcd, client: EtcdClient, keyspace: str | None, served: str
) -> None:
    others = {NODE: "", "10.0.0.8:4000": "5", "10.0.0.9:4000": "6"}
    await client.put("/keyspaces/tidb/5/tidb/server/info/1", b"{")
    for address in others:
        await register(client, address, keyspace=others[address])
    others.pop(served)
    async with observing(etcd.url, keyspace=keyspace) as watcher:
        assert (await watcher.until_nodes(served)).other_keyspace == others
        await register(client, "10.0.0.10:4000", keyspace=keyspace or "")
        await watcher.until_nodes(served, "10.0.0.10:4000")
        await register(client, "10.0.0.11:4000", keyspace="7")
        topology = await watcher.until(lambda topology: len(topology.other_keyspace) == 3)
        assert topology.other_keyspace == {**others, "10.0.0.11:4000": "7"}
        assert topology.problems == ()


async def test_2000_servers_at_once(etcd: Etcd, client: EtcdClient) -> None:
    async with observing(etcd.url) as watcher:
        await watcher.until(lambda topology: topology.is_complete)
        for start in range(0, 2000, 50):
            puts = {}
            for number in range(start, start + 50):
                puts[key(f"tidb-{number}:4000")] = info()
                puts[key(f"tidb-{number}:4000", "ttl")] = b"1"
            await client.txn({}, puts=puts)
        topology = await watcher.until(lambda topology: len(topology.nodes) == 2000, within=30)
        assert all(node.registered for node in topology.nodes.values())
        # One publication a revision, as etcd tells of them, and never half a one.
        assert all(len(published.nodes) % 50 == 0 for published in watcher.published)
        assert len(watcher.published) <= 41


async def test_etcd_is_killed_and_comes_back(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE)
        for round_ in range(2):
            await etcd.kill()
            lost = await watcher.until(lambda topology: bool(topology.outage))
            assert etcd.url in lost.outage
            assert (list(lost.nodes), lost.is_complete) == (list(watcher.latest.nodes), True)
            await etcd.launch()
            # Changed before the observer is back, as likely as not.
            address = f"10.0.1.{round_}:4000"
            async with EtcdClient([etcd.url]) as other:
                await register(other, address)
            begun = time.perf_counter()
            await watcher.until(lambda topology: not topology.outage)
            await watcher.until(
                lambda topology, address=address: (  # type: ignore[misc]
                    address in topology.nodes and topology.nodes[address].registered
                )
            )
            assert time.perf_counter() - begun < 5
        await client.delete(key(NODE))
        await watcher.until_nodes("10.0.1.0:4000", "10.0.1.1:4000")
        sizes = [len(topology.nodes) for topology in watcher.published]
        assert sizes[:-1] == sorted(sizes[:-1])  # no publication without the nodes of the one before


async def test_etcd_is_away_at_the_start(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    await etcd.kill()
    async with observing(etcd.url) as watcher:
        topology = await watcher.until(lambda topology: bool(topology.outage))
        assert (topology.is_complete, topology.nodes) == (False, {})
        assert "check that PD runs" in topology.outage
        await etcd.launch()
        topology = await watcher.until_nodes(NODE)
        assert (topology.is_complete, topology.outage) == (True, "")


async def test_a_hung_etcd_is_an_outage(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE)
        os.kill(etcd.process.pid, signal.SIGSTOP)
        try:
            await watcher.until(lambda topology: bool(topology.outage), within=25)
        finally:
            os.kill(etcd.process.pid, signal.SIGCONT)
        assert list((await watcher.until(lambda topology: not topology.outage)).nodes) == [NODE]


async def test_changes_that_etcd_forgot_meanwhile_are_listed_again(
    etcd: Etcd, client: EtcdClient, ports: Ports
) -> None:
    for address in (NODE, "10.0.0.8:4000"):
        await register(client, address)
    async with observing(etcd.url) as watcher:
        await watcher.until_nodes(NODE, "10.0.0.8:4000")
        await etcd.kill()
        await watcher.until(lambda topology: bool(topology.outage))
        # The same store where the observer does not look for it.
        async with (
            Etcd(etcd.directory, EtcdPorts.allocate(ports)) as elsewhere,
            EtcdClient([elsewhere.url]) as hidden,
        ):
            await hidden.delete("/topology/tidb/10.0.0.8:4000", prefix=True)
            await register(hidden, "10.0.0.9:4000")
            await compact_all(elsewhere)
        await etcd.launch()
        assert (await watcher.until_nodes(NODE, "10.0.0.9:4000")).outage == ""
        await client.delete(key(NODE))
        await watcher.until_nodes("10.0.0.9:4000")


async def test_a_store_that_went_back_in_time_is_listed_again(tmp_path: Path) -> None:
    async with Etcd.start(tmp_path / "first") as first, EtcdClient([first.url]) as client:
        for _ in range(50):
            await register(client, "10.0.0.8:4000")
        async with observing(first.url) as watcher:
            await watcher.until_nodes("10.0.0.8:4000")
            await first.kill()
            (tmp_path / "first" / "etcd.data").rename(tmp_path / "lost")
            await first.launch()
            await register(client, NODE)
            topology = await watcher.until_nodes(NODE)
            assert topology.outage == ""
            await client.delete(key(NODE))
            await watcher.until_nodes()


async def test_each_of_three_members_dies_in_turn(tmp_path: Path) -> None:
    """One of three is configured; the others are learned from it."""
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls) as client:
        await register(client, NODE)
        async with observing(cluster.urls[0]) as watcher:
            await watcher.until_nodes(NODE)
            expected = [NODE]
            for number, member in enumerate(cluster.members):
                await member.kill()
                address = f"10.0.1.{number}:4000"
                expected.append(address)
                await register_at_last(client, address)
                await watcher.until_nodes(*expected)
                await member.launch()
            await watcher.until(lambda topology: not topology.outage)


async def register_at_last(client: EtcdClient, address: str) -> None:
    """Register a node, as often as it takes while the members elect a leader."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await register(client, address)
            except PdError:
                await asyncio.sleep(0.1)


async def test_a_member_without_a_leader_is_left_for_those_that_have_one(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls) as client:
        await register(client, NODE)
        async with observing(*cluster.urls) as watcher:
            await watcher.until_nodes(NODE)
            for member in cluster.members[1:]:
                await member.kill()
            outage = (await watcher.until(lambda topology: bool(topology.outage), within=30)).outage
            assert "no leader" in outage or "cannot be reached" in outage
            assert list(watcher.latest.nodes) == [NODE]
            async with asyncio.TaskGroup() as starting:
                for member in cluster.members[1:]:
                    starting.create_task(member.launch())
            await watcher.until(lambda topology: not topology.outage)
            await register(client, "10.0.0.8:4000")
            await watcher.until_nodes(NODE, "10.0.0.8:4000")


async def test_mutual_tls(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    ca.issue_cert("tidevoy").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    server = EtcdTls(tmp_path / "server.pem", tmp_path / "server.pem", tmp_path / "ca.pem")
    tls = ClientTls(ca=tmp_path / "ca.pem", cert=tmp_path / "client.pem", key=tmp_path / "client.pem")
    async with (
        Etcd.start(tmp_path / "etcd", tls=server) as etcd,
        EtcdClient([etcd.url], tls=tls) as client,
        observing(etcd.url, tls=tls) as watcher,
        observing(etcd.url) as stranger,
    ):
        await watcher.until(lambda topology: topology.is_complete)
        await register(client, NODE)
        await watcher.until_nodes(NODE)
        topology = await stranger.until(lambda topology: bool(topology.outage))
        assert not topology.is_complete
