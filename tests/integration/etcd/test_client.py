"""The etcd client against real etcd servers: data, watches, leases, and members that die or hang."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
import trustme

from controlplane.config.settings import ClientTls
from controlplane.errors import Compacted, ConfigError, LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry, KeyChange, WatchBatch
from sandbox.etcd import Etcd, EtcdCluster, EtcdTls
from tests.support.controlplane.etcd_compaction import compact
from tests.support.waiting import wait_until

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as connected:
        yield connected


async def changes_until(watch: AsyncGenerator[WatchBatch, None], key: str) -> list[str]:
    """The keys of all changes up to that of `key`."""
    keys: list[str] = []
    async with asyncio.timeout(20):
        async for batch in watch:
            keys += [change.key for change in batch.changes]
            if key in keys:
                return keys
    raise AssertionError("the watch ended")


async def test_values_are_written_read_and_deleted(client: EtcdClient) -> None:
    first = await client.put("/a/1", b"one")
    second = await client.put("/a/2", b"\x00\xff")
    await client.put("/b/1", b"other")
    assert second == first + 1
    assert await client.get("/a/1") == Entry(b"one", first)
    assert await client.get("/a/") is None
    listing = await client.range("/a/")
    assert (dict(listing.entries), listing.revision) == (
        {"/a/1": Entry(b"one", first), "/a/2": Entry(b"\x00\xff", second)},
        second + 1,
    )
    assert await client.delete("/a/1") == 1
    assert await client.delete("/a/1") == 0
    assert await client.delete("/", prefix=True) == 2
    assert dict((await client.range("/")).entries) == {}


async def test_a_long_listing_is_of_one_revision(client: EtcdClient) -> None:
    for start in range(0, 2500, 100):
        await client.txn({}, puts={f"/many/{number:05}": b"x" for number in range(start, start + 100)})
    whole = await client.range("/many/")
    await client.delete("/many/00000")
    assert len(whole.entries) == 2500
    assert len((await client.range("/many/", revision=whole.revision)).entries) == 2500
    assert len((await client.range("/many/")).entries) == 2499


async def test_a_listing_of_a_forgotten_revision_is_refused(etcd: Etcd, client: EtcdClient) -> None:
    await client.put("/a", b"1")
    await compact(etcd, await client.put("/a", b"2"))
    with pytest.raises(Compacted, match="no longer has revision 2"):
        await client.range("/", revision=2)


async def test_a_transaction_holds_whole_or_not_at_all(client: EtcdClient) -> None:
    created = await client.txn({"/x": 0}, puts={"/x": b"1", "/y": b"1"})
    assert created is not None
    assert await client.txn({"/x": 0}, puts={"/x": b"2"}, deletes=["/y"]) is None
    assert await client.txn({"/x": created, "/y": created}, puts={"/x": b"3"}, deletes=["/y"]) == created + 1
    entry = await client.get("/x")
    assert (entry and entry.value, await client.get("/y")) == (b"3", None)


async def test_a_watch_tells_every_change_in_order(client: EtcdClient) -> None:
    listing = await client.range("/a/")
    async with aclosing(client.watch("/a/", listing.revision + 1)) as watch:
        assert await anext(watch) == WatchBatch(listing.revision)
        put = await client.put("/a/1", b"one")
        assert await anext(watch) == WatchBatch(put, (KeyChange("/a/1", b"one"),))
        await client.put("/b/1", b"other prefix")
        both = await client.txn({}, puts={"/a/2": b"2"}, deletes=["/a/1"])
        assert both is not None
        batch = await anext(watch)
        assert batch.revision == both
        assert set(batch.changes) == {KeyChange("/a/2", b"2"), KeyChange("/a/1", None)}


async def test_a_watch_begins_in_the_past(client: EtcdClient) -> None:
    first = await client.put("/a/first", b"")
    for number in range(1500):  # more than etcd sends at once
        await client.put("/a/again", b"%d" % number)
    await client.put("/a/last", b"")
    async with aclosing(client.watch("/a/", first)) as watch:
        keys = await changes_until(watch, "/a/last")
    assert (keys[0], len(keys)) == ("/a/first", 1502)


async def test_changes_larger_than_a_message_are_put_together_again(client: EtcdClient) -> None:
    revision = await client.put("/a/0", b"")
    for key in ("/a/1", "/a/2", "/a/3", "/a/4"):  # etcd cuts answers above 2 MB
        await client.put(key, b"x" * 1_000_000)
    async with aclosing(client.watch("/a/", revision)) as watch:
        assert await changes_until(watch, "/a/4") == ["/a/0", "/a/1", "/a/2", "/a/3", "/a/4"]


async def test_a_watch_from_a_forgotten_revision_says_so(etcd: Etcd, client: EtcdClient) -> None:
    await client.put("/a", b"1")
    await client.put("/a", b"2")
    last = await client.put("/a", b"3")
    await compact(etcd, last)
    async with aclosing(client.watch("/a", 2)) as watch:
        with pytest.raises(Compacted, match="list again") as caught:
            await changes_until(watch, "/a")
    assert caught.value.revision == last


async def test_a_watch_from_a_future_revision_says_so(client: EtcdClient) -> None:
    async with aclosing(client.watch("/a", 1000)) as watch:
        with pytest.raises(Compacted, match="behind 999, which was seen"):
            await anext(watch)


async def test_an_idle_watch_lives_and_a_hung_server_is_noticed(etcd: Etcd, client: EtcdClient) -> None:
    async with aclosing(client.watch("/a", 1)) as watch:
        await anext(watch)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.wait({reading}, timeout=8)  # longer than a watch may be silent
        assert not reading.done()
        await client.put("/a", b"1")
        assert (await reading).changes == (KeyChange("/a", b"1"),)
        os.kill(etcd.process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                # Its own clock and gRPC's pings look for the same thing; either may be first to see it.
                # What becomes of the connection then is gRPC's to say.
                with pytest.raises(PdError, match=r"has been silent for 6 s|cannot be reached|was left"):
                    await anext(watch)
            with pytest.raises(PdError, match=r"did not answer in time|cannot be reached|was left"):
                await client.get("/a")
        finally:
            os.kill(etcd.process.pid, signal.SIGCONT)

    async def is_back() -> bool:
        with suppress(PdError):  # gRPC pauses between two attempts to connect
            return bool(await client.get("/a"))
        return False

    await wait_until(is_back)


async def _watch(client: EtcdClient) -> None:
    async with aclosing(client.watch("/a", 1)) as watch:
        async for _ in watch:
            pass


async def _read(client: EtcdClient) -> None:
    while True:
        await client.get("/a")


async def _write(client: EtcdClient) -> None:
    while True:
        await client.put("/a", b"")


async def _keep_alive(client: EtcdClient) -> None:
    await client.lease_keepalive(await client.lease_grant(5))


@pytest.mark.parametrize("use", [_watch, _read, _write, _keep_alive])
async def test_every_use_may_be_cancelled_at_any_moment(
    etcd: Etcd, use: Callable[[EtcdClient], Awaitable[None]]
) -> None:
    before = asyncio.all_tasks()
    for turns in range(40):
        async with EtcdClient([etcd.url]) as client:
            using = asyncio.ensure_future(use(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            using.cancel()
            assert await asyncio.wait({using}, timeout=5) == ({using}, set())
            assert using.cancelled()
    left = asyncio.all_tasks() - before  # gRPC still looks at how its calls ended
    if left:
        assert (await asyncio.wait(left, timeout=5))[1] == set()


async def test_closing_the_client_ends_its_watches(etcd: Etcd) -> None:
    client = EtcdClient([etcd.url])
    async with aclosing(client.watch("/a", 1)) as watch:
        await anext(watch)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(PdError, match="was lost"):
            await reading


async def test_a_lease_is_kept_and_then_lost(client: EtcdClient) -> None:
    lease = await client.lease_grant(2)
    await client.put("/leased", b"1", lease)
    entry = await client.get("/leased")
    assert entry is not None
    assert entry.lease == lease
    keeping = asyncio.create_task(client.lease_keepalive(lease))
    await asyncio.wait({keeping}, timeout=5)
    assert not keeping.done()
    assert await client.get("/leased") is not None
    await client.lease_revoke(lease)
    await client.lease_revoke(lease)
    assert await client.get("/leased") is None
    with pytest.raises(LeaseLost, match="it has ended"):
        await keeping
    with pytest.raises(LeaseLost, match="it has ended"):
        await client.put("/leased", b"1", lease)


async def test_a_lease_that_nobody_keeps_deletes_its_keys(client: EtcdClient) -> None:
    revision = await client.put("/leased", b"1", await client.lease_grant(1))
    async with aclosing(client.watch("/leased", revision + 1)) as watch:
        assert await changes_until(watch, "/leased") == ["/leased"]


async def test_a_lease_is_lost_when_etcd_is(etcd: Etcd, client: EtcdClient) -> None:
    lease = await client.lease_grant(2)
    keeping = asyncio.create_task(client.lease_keepalive(lease))
    await etcd.kill()
    async with asyncio.timeout(10):
        with pytest.raises(LeaseLost, match="could not be kept alive in time"):
            await keeping


async def test_what_is_wrong_is_said(etcd: Etcd, client: EtcdClient) -> None:
    async with EtcdClient([NOWHERE]) as nowhere:
        with pytest.raises(PdError, match=r"no PD member answers: http://127.0.0.1:1 cannot be reached"):
            await nowhere.get("/a")
        with pytest.raises(PdError, match="cannot be reached"):
            await nowhere.put("/a", b"")
        with pytest.raises(PdError, match=r"watch on /a was lost: PD at .* cannot be reached"):
            await anext(nowhere.watch("/a", 1))
    await etcd.kill()
    with pytest.raises(PdError, match="check that PD runs"):
        await client.get("/a")


async def test_a_silent_address_costs_its_share_only(etcd: Etcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nobody answers
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with EtcdClient([nobody, etcd.url]) as client:
            async with asyncio.timeout(4):
                await client.put("/a", b"1")
            async with asyncio.timeout(1):
                assert await client.get("/a")


async def test_a_member_of_another_cluster_is_not_listened_to(etcd: Etcd, tmp_path: Path) -> None:
    async with Etcd.start(tmp_path / "other") as other, EtcdClient([etcd.url, other.url]) as client:
        await client.put("/a", b"1")
        await etcd.kill()
        with pytest.raises(PdError, match=f"{other.url} belongs to the cluster .* restart Tidevoy"):
            await client.get("/a")
        reasons = []
        for _ in range(2):
            with pytest.raises(PdError) as caught:
                await anext(client.watch("/a", 1))
            reasons.append(str(caught.value))
        assert any(f"{other.url} belongs to the cluster" in reason for reason in reasons)


async def test_any_two_of_three_members_are_enough(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls) as client:
        assert sorted(await client.member_urls()) == sorted(cluster.urls)
        for number, member in enumerate(cluster.members):
            await member.kill()
            async with asyncio.timeout(10):
                while True:
                    try:
                        await client.put("/a", b"%d" % number)
                        break
                    except PdError:
                        await asyncio.sleep(0.1)
                entry = await client.get("/a")
            assert entry is not None
            assert entry.value == b"%d" % number
            await member.launch()


async def test_a_member_without_a_leader_is_left_at_once(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls[:1]) as client:
        await client.put("/a", b"1")
        async with aclosing(client.watch("/a", 1)) as watch:
            assert await changes_until(watch, "/a") == ["/a"]
            for member in cluster.members[1:]:
                await member.kill()
            async with asyncio.timeout(20):
                with pytest.raises(PdError, match="no leader"):
                    await anext(watch)
        with pytest.raises(PdError, match="no leader"):
            await client.get("/a")


async def test_learned_members_take_over(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls[:1]) as client:
        await client.put("/a", b"1")
        await client.set_members(
            [*await client.member_urls(), "https://127.0.0.1:2", "http://no-port", "nonsense"]
        )
        assert set(client.endpoints) == set(cluster.urls)
        await cluster.members[0].kill()
        async with asyncio.timeout(10):
            assert await client.get("/a")
        await client.set_members([])
        assert client.endpoints == tuple(cluster.urls[:1])


class Authority:
    """A CA, a server certificate for 127.0.0.1 and a client certificate, as files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        ca = trustme.CA()
        self.ca = directory / "ca.pem"
        ca.cert_pem.write_to_path(self.ca)
        for name, certificate in (
            ("server", ca.issue_cert("127.0.0.1")),
            ("client", ca.issue_cert("tidevoy")),
        ):
            certificate.private_key_pem.write_to_path(directory / f"{name}.key")
            certificate.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        self.server = EtcdTls(directory / "server.pem", directory / "server.key", self.ca)
        self.client = ClientTls(ca=self.ca, cert=directory / "client.pem", key=directory / "client.key")


async def test_mutual_tls(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with Etcd.start(tmp_path / "etcd", tls=authority.server) as etcd:
        async with EtcdClient([etcd.url], tls=authority.client) as client:
            await client.put("/a", b"1")
            await client.set_members(await client.member_urls())
            assert client.endpoints == (etcd.url,)
            async with aclosing(client.watch("/a", 1)) as watch:
                assert await changes_until(watch, "/a") == ["/a"]
        for tls in (
            ClientTls(ca=authority.ca),  # no certificate of ours
            stranger.client,  # neither trusts the other
            ClientTls(),  # the system's CAs do not know this one
        ):
            async with EtcdClient([etcd.url], tls=tls) as client:
                with pytest.raises(PdError, match="cannot be reached"):
                    await client.get("/a")
        async with EtcdClient([etcd.url.replace("https", "http")]) as client:
            with pytest.raises(PdError, match="cannot be reached"):
                await client.get("/a")


async def test_an_unreadable_key_is_a_bad_setting(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").client
    assert tls.key is not None
    tls.key.unlink()
    with pytest.raises(ConfigError, match=r"client.key: pd.tls.key: cannot be read .*; make it readable"):
        EtcdClient(["https://127.0.0.1:1"], tls=tls)
