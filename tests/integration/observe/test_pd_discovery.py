"""PD discovery with a real etcd: servers start and stop; PD members crash, hang, and lose data."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from controlplane.config.own_tls import ClientTls
from controlplane.config.settings import PdSettings
from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import WatchBatch
from controlplane.model.nodes import Topology
from controlplane.observe.discovery.pd_discovery import PdObserver
from sandbox.etcd import Etcd, EtcdCluster, EtcdPorts, EtcdTls
from sandbox.ports import Ports
from tests.support.controlplane.etcd_compaction import compact
from tests.support.suspension import suspended

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
    prefix = f"/keyspaces/tidb/{keyspace}" if keyspace else ""
    return f"{prefix}/topology/tidb/{address}/{field}"


async def register(client: EtcdClient, address: str, *, lease: int = 0, keyspace: str = "") -> None:
    """Write the keys that a TiDB server writes when it starts."""
    await client.put(key(address, "info", keyspace), info())
    await client.put(key(address, "ttl", keyspace), b"1767225630123456789", lease)


class TopologyRecorder:
    """Records what an observer publishes, and waits for more."""

    def __init__(self) -> None:
        self.published: list[Topology] = []
        self.times: list[float] = []
        self._published = asyncio.Event()

    def publish(self, topology: Topology) -> None:
        self.published.append(topology)
        self.times.append(time.perf_counter())
        self._published.set()

    @property
    def latest(self) -> Topology:
        return self.published[-1]

    async def wait_until(self, condition: Callable[[Topology], bool], timeout: float = 15.0) -> Topology:
        """Return the latest or the next published topology for which `condition` is true."""
        async with asyncio.timeout(timeout):
            while not (self.published and condition(self.latest)):
                self._published.clear()
                await self._published.wait()
        return self.latest

    async def wait_for_nodes(self, *addresses: str) -> Topology:
        return await self.wait_until(lambda topology: sorted(topology.nodes) == sorted(addresses))


@asynccontextmanager
async def observing(*urls: str, **settings: Any) -> AsyncIterator[TopologyRecorder]:
    recorder = TopologyRecorder()
    observer = PdObserver(PdSettings(urls=urls, **settings), recorder.publish)
    run_task = asyncio.create_task(observer.run())
    try:
        yield recorder
        assert not run_task.done()
    finally:
        run_task.cancel()
        await asyncio.wait({run_task})
        assert run_task.cancelled()


async def compact_all(etcd: Etcd) -> None:
    """Compact etcd up to its current revision, as PD's etcd does every hour."""
    async with EtcdClient([etcd.url]) as client:
        revision = await client.put("/x", b"")
    await compact(etcd, revision)


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as connected:
        yield connected


async def test_server_starts_crashes_and_is_removed(etcd: Etcd, client: EtcdClient) -> None:
    async with observing(etcd.url) as recorder:
        assert await recorder.wait_until(lambda topology: topology.is_complete) == Topology(
            recorder.latest.source, is_complete=True
        )
        lease = await client.lease_grant(2)
        await register(client, NODE, lease=lease)
        node = (
            await recorder.wait_until(
                lambda topology: bool(topology.nodes) and topology.nodes[NODE].registered
            )
        ).nodes[NODE]
        assert (node.status_address, node.version, node.started_at) == (
            "10.0.0.7:10080",
            "v8.5.3",
            1767225600.0,
        )
        # The server is killed: its lease expires, and `info` stays.
        await recorder.wait_until(lambda topology: not topology.nodes[NODE].registered)
        # A server on port 400 stops. TiDB deletes its own keys by the prefix that ends with its address,
        # without a slash, so the keys of port 4000 are deleted too.
        stopped_neighbour = NODE.removesuffix("0")
        await client.delete(f"/topology/tidb/{stopped_neighbour}", prefix=True)
        await recorder.wait_for_nodes()
        assert [len(topology.nodes) for topology in recorder.published] == [0, 1, 1, 1, 0]


async def test_existing_registrations_are_listed_at_once(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    await register(client, "[fd00::7]:4000")
    await register(client, "tidb-0.tidb-peer:4000")
    await client.put("/topology/tiproxy/10.0.0.9:6000/info", b"{}")
    async with observing(etcd.url) as recorder:
        topology = await recorder.wait_until(lambda topology: True)
    assert sorted(topology.nodes) == sorted([NODE, "[fd00::7]:4000", "tidb-0.tidb-peer:4000"])
    assert (topology.is_complete, topology.outage, topology.problems) == (True, "", ())


async def test_change_is_published_at_once(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE)
        delays = []
        for number in range(100):
            version, count = f"v{number}", len(recorder.published)
            started_at = time.perf_counter()
            await client.put(key(NODE), info(version=version))
            await recorder.wait_until(
                lambda topology, version=version: topology.nodes[NODE].version == version  # type: ignore[misc]
            )
            delays.append(recorder.times[count] - started_at)
        assert len(recorder.published) == count + 1  # one publication per change
    # The delay includes the put, because etcd writes it to disk before it notifies watchers.
    assert statistics.median(delays) < 0.2


async def test_refreshed_registrations_are_not_published(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE)
        count = len(recorder.published)
        for number in range(5):
            await client.put(key(NODE), info())
            await client.put(key(NODE, "ttl"), b"%d" % number)
        await register(client, "10.0.0.8:4000")
        await recorder.wait_until(
            lambda topology: len(topology.nodes) == 2 and topology.nodes["10.0.0.8:4000"].registered
        )
        # At most two publications, for `info` and `ttl` of the new node, and none for the refreshed node.
        assert len(recorder.published) <= count + 2


async def test_malformed_entries_are_reported_and_affect_no_others(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    malformed = {
        key("10.0.0.8:4000"): b"{",
        key("10.0.0.9:4000"): info(status_port=70000),
        key("10.0.0.10:4000"): b"\xff\xfe",
        key("10.0.0.11:4000"): b'{"x":"' + b"x" * 1_000_000 + b'"}',
        key("no-port"): info(),
        "/topology/tidb/stray": b"",
    }
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE)
        for name, value in malformed.items():
            await client.put(name, value)
        await client.put(key("10.0.0.12:4000", "ttl"), b"1")  # without info: not a node yet
        topology = await recorder.wait_until(lambda topology: len(topology.problems) == len(malformed))
        assert {problem.subject for problem in topology.problems} == set(malformed)
        assert list(topology.nodes) == [NODE]
        await client.put(key("10.0.0.8:4000"), info())
        await recorder.wait_for_nodes(NODE, "10.0.0.8:4000")
        await client.delete("/topology/tidb/", prefix=True)
        assert (await recorder.wait_for_nodes()).problems == ()


@pytest.mark.parametrize(("keyspace", "served"), [(None, NODE), ("5", "10.0.0.8:4000")])
async def test_only_the_configured_keyspace_is_served(
    etcd: Etcd, client: EtcdClient, keyspace: str | None, served: str
) -> None:
    others = {NODE: "", "10.0.0.8:4000": "5", "10.0.0.9:4000": "6"}
    await client.put("/keyspaces/tidb/5/tidb/server/info/1", b"{")
    for address in others:
        await register(client, address, keyspace=others[address])
    others.pop(served)
    async with observing(etcd.url, keyspace=keyspace) as recorder:
        assert (await recorder.wait_for_nodes(served)).other_keyspace == others
        await register(client, "10.0.0.10:4000", keyspace=keyspace or "")
        await recorder.wait_for_nodes(served, "10.0.0.10:4000")
        await register(client, "10.0.0.11:4000", keyspace="7")
        topology = await recorder.wait_until(lambda topology: len(topology.other_keyspace) == 3)
        assert topology.other_keyspace == {**others, "10.0.0.11:4000": "7"}
        assert topology.problems == ()


async def test_2000_servers_are_published_per_revision(etcd: Etcd, client: EtcdClient) -> None:
    async with observing(etcd.url) as recorder:
        await recorder.wait_until(lambda topology: topology.is_complete)
        for start in range(0, 2000, 50):
            puts = {}
            for number in range(start, start + 50):
                puts[key(f"tidb-{number}:4000")] = info()
                puts[key(f"tidb-{number}:4000", "ttl")] = b"1"
            await client.txn({}, puts=puts)
        topology = await recorder.wait_until(lambda topology: len(topology.nodes) == 2000, timeout=30)
        assert all(node.registered for node in topology.nodes.values())
        # At most one publication per revision, and never a part of a revision.
        assert all(len(published.nodes) % 50 == 0 for published in recorder.published)
        assert len(recorder.published) <= 41


async def test_discovery_recovers_after_etcd_restarts(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE)
        for round_ in range(2):
            await etcd.kill()
            lost = await recorder.wait_until(lambda topology: bool(topology.outage))
            assert etcd.url in lost.outage
            assert (list(lost.nodes), lost.is_complete) == (list(recorder.latest.nodes), True)
            await etcd.launch()
            # The change probably happens before the observer has reconnected.
            address = f"10.0.1.{round_}:4000"
            async with EtcdClient([etcd.url]) as other:
                await register(other, address)
            started_at = time.perf_counter()
            await recorder.wait_until(lambda topology: not topology.outage)
            await recorder.wait_until(
                lambda topology, address=address: (  # type: ignore[misc]
                    address in topology.nodes and topology.nodes[address].registered
                )
            )
            assert time.perf_counter() - started_at < 5
        await client.delete(key(NODE))
        await recorder.wait_for_nodes("10.0.1.0:4000", "10.0.1.1:4000")
        sizes = [len(topology.nodes) for topology in recorder.published]
        assert sizes[:-1] == sorted(sizes[:-1])  # no publication has fewer nodes than the previous one


async def test_watch_that_ends_without_an_error_is_listed_again(
    etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended_watch(*arguments: object) -> AsyncIterator[WatchBatch]:
        for _ in range(0):
            yield WatchBatch(0)

    async with observing(etcd.url) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(EtcdClient, "watch", ended_watch)
            await recorder.wait_until(lambda topology: "ended without a reason" in topology.outage)
            await register(client, NODE)
        assert (await recorder.wait_for_nodes(NODE)).is_complete
        await recorder.wait_until(lambda topology: not topology.outage)


async def test_discovery_starts_while_etcd_is_down(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    await etcd.kill()
    async with observing(etcd.url) as recorder:
        topology = await recorder.wait_until(lambda topology: bool(topology.outage))
        assert (topology.is_complete, topology.nodes) == (False, {})
        assert "check that PD is running" in topology.outage
        await etcd.launch()
        topology = await recorder.wait_for_nodes(NODE)
        assert (topology.is_complete, topology.outage) == (True, "")


async def test_hung_etcd_is_an_outage(etcd: Etcd, client: EtcdClient) -> None:
    await register(client, NODE)
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE)
        async with suspended(etcd.process.pid):
            await recorder.wait_until(lambda topology: bool(topology.outage), timeout=25)
        assert list((await recorder.wait_until(lambda topology: not topology.outage)).nodes) == [NODE]


async def test_compacted_changes_are_listed_again(etcd: Etcd, client: EtcdClient, ports: Ports) -> None:
    for address in (NODE, "10.0.0.8:4000"):
        await register(client, address)
    async with observing(etcd.url) as recorder:
        await recorder.wait_for_nodes(NODE, "10.0.0.8:4000")
        await etcd.kill()
        await recorder.wait_until(lambda topology: bool(topology.outage))
        # Run the same store at an address that the observer does not know.
        async with (
            Etcd(etcd.directory, EtcdPorts.allocate(ports)) as other_etcd,
            EtcdClient([other_etcd.url]) as other_client,
        ):
            await other_client.delete("/topology/tidb/10.0.0.8:4000", prefix=True)
            await register(other_client, "10.0.0.9:4000")
            await compact_all(other_etcd)
        await etcd.launch()
        assert (await recorder.wait_for_nodes(NODE, "10.0.0.9:4000")).outage == ""
        await client.delete(key(NODE))
        await recorder.wait_for_nodes("10.0.0.9:4000")


async def test_store_with_lower_revisions_is_listed_again(tmp_path: Path) -> None:
    async with Etcd.start(tmp_path / "first") as first, EtcdClient([first.url]) as client:
        for _ in range(50):
            await register(client, "10.0.0.8:4000")
        async with observing(first.url) as recorder:
            await recorder.wait_for_nodes("10.0.0.8:4000")
            await first.kill()
            (tmp_path / "first" / "etcd.data").rename(tmp_path / "lost")
            await first.launch()
            await register(client, NODE)
            topology = await recorder.wait_for_nodes(NODE)
            assert topology.outage == ""
            await client.delete(key(NODE))
            await recorder.wait_for_nodes()


async def test_discovery_survives_the_crash_of_each_member(tmp_path: Path) -> None:
    """The configuration names one of three members. This member tells the observer about the other two."""
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls) as client:
        await register(client, NODE)
        async with observing(cluster.urls[0]) as recorder:
            await recorder.wait_for_nodes(NODE)
            expected = [NODE]
            for number, member in enumerate(cluster.members):
                await member.kill()
                address = f"10.0.1.{number}:4000"
                expected.append(address)
                await register_with_retry(client, address)
                await recorder.wait_for_nodes(*expected)
                await member.launch()
            await recorder.wait_until(lambda topology: not topology.outage)


async def register_with_retry(client: EtcdClient, address: str) -> None:
    """Register a node; retry while the members elect a leader."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await register(client, address)
            except PdError:
                await asyncio.sleep(0.1)


async def test_outage_ends_when_members_have_a_leader_again(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls) as client:
        await register(client, NODE)
        async with observing(*cluster.urls) as recorder:
            await recorder.wait_for_nodes(NODE)
            for member in cluster.members[1:]:
                await member.kill()
            outage = (await recorder.wait_until(lambda topology: bool(topology.outage), timeout=30)).outage
            assert "no leader" in outage or "is unreachable" in outage
            assert list(recorder.latest.nodes) == [NODE]
            async with asyncio.TaskGroup() as starting:
                for member in cluster.members[1:]:
                    starting.create_task(member.launch())
            await recorder.wait_until(lambda topology: not topology.outage)
            await register(client, "10.0.0.8:4000")
            await recorder.wait_for_nodes(NODE, "10.0.0.8:4000")


async def test_mutual_tls_needs_a_client_certificate(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    ca.issue_cert("tidevoy").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    server = EtcdTls(tmp_path / "server.pem", tmp_path / "server.pem", tmp_path / "ca.pem")
    tls = ClientTls(ca=tmp_path / "ca.pem", cert=tmp_path / "client.pem", key=tmp_path / "client.pem")
    async with (
        Etcd.start(tmp_path / "etcd", tls=server) as etcd,
        EtcdClient([etcd.url], tls=tls) as client,
        observing(etcd.url, tls=tls) as recorder,
        observing(etcd.url) as recorder_without_cert,
    ):
        await recorder.wait_until(lambda topology: topology.is_complete)
        await register(client, NODE)
        await recorder.wait_for_nodes(NODE)
        topology = await recorder_without_cert.wait_until(lambda topology: bool(topology.outage))
        assert not topology.is_complete
