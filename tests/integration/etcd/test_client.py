"""The etcd client against real etcd servers: data, watches, leases, and members that die or hang."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from controlplane.config.own_tls import ClientTls
from controlplane.errors import Compacted, ConfigError, LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry, KeyChange, WatchBatch
from sandbox.etcd import Etcd, EtcdCluster, EtcdTls
from tests.support.controlplane.etcd_compaction import compact
from tests.support.suspension import suspended
from tests.support.waiting import wait_until

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as connected:
        yield connected


async def changes_until(watch: AsyncGenerator[WatchBatch, None], key: str) -> list[str]:
    """Return the keys of all changes up to a change of `key`."""
    keys: list[str] = []
    async with asyncio.timeout(20):
        async for batch in watch:
            keys += [change.key for change in batch.changes]
            if key in keys:
                return keys
    raise AssertionError("the watch ended")


async def test_writes_reads_and_deletes_values(client: EtcdClient) -> None:
    first_revision = await client.put("/a/1", b"one")
    second_revision = await client.put("/a/2", b"\x00\xff")
    await client.put("/b/1", b"other")
    assert second_revision == first_revision + 1
    assert await client.get("/a/1") == Entry(b"one", first_revision)
    assert await client.get("/a/") is None
    listing = await client.range("/a/")
    assert (dict(listing.entries), listing.revision) == (
        {"/a/1": Entry(b"one", first_revision), "/a/2": Entry(b"\x00\xff", second_revision)},
        second_revision + 1,
    )
    assert await client.delete("/a/1") == 1
    assert await client.delete("/a/1") == 0
    assert await client.delete("/", prefix=True) == 2
    assert dict((await client.range("/")).entries) == {}


async def test_listing_with_several_pages_has_one_revision(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in range(0, 2500, 100):
        await client.txn({}, puts={f"/many/{number:05}": b"x" for number in range(start, start + 100)})
    original_range = EtcdClient._range

    async def range_then_delete(self: EtcdClient, *args: Any) -> Any:
        page = await original_range(self, *args)
        await client.delete("/many/02499")  # after the first page, before the last one
        return page

    with monkeypatch.context() as patch:
        patch.setattr(EtcdClient, "_range", range_then_delete)
        assert len((await client.range("/many/")).entries) == 2500
    assert len((await client.range("/many/")).entries) == 2499


async def test_transaction_is_atomic(client: EtcdClient) -> None:
    created = await client.txn({"/x": 0}, puts={"/x": b"1", "/y": b"1"})
    assert created is not None
    assert await client.txn({"/x": 0}, puts={"/x": b"2"}, deletes=["/y"]) is None
    assert await client.txn({"/x": created, "/y": created}, puts={"/x": b"3"}, deletes=["/y"]) == created + 1
    entry = await client.get("/x")
    assert (entry and entry.value, await client.get("/y")) == (b"3", None)


async def test_watch_yields_every_change_in_order(client: EtcdClient) -> None:
    listing = await client.range("/a/")
    async with aclosing(client.watch("/a/", listing.revision + 1)) as watch:
        assert await anext(watch) == WatchBatch(listing.revision)
        put = await client.put("/a/1", b"one")
        assert await anext(watch) == WatchBatch(put, (KeyChange("/a/1", b"one"),))
        await client.put("/b/1", b"other prefix")
        both_revision = await client.txn({}, puts={"/a/2": b"2"}, deletes=["/a/1"])
        assert both_revision is not None
        batch = await anext(watch)
        assert batch.revision == both_revision
        assert set(batch.changes) == {KeyChange("/a/2", b"2"), KeyChange("/a/1", None)}


async def test_watch_starts_at_past_revision(client: EtcdClient) -> None:
    first = await client.put("/a/first", b"")
    for number in range(1500):  # more than etcd sends in one message
        await client.put("/a/again", b"%d" % number)
    await client.put("/a/last", b"")
    async with aclosing(client.watch("/a/", first)) as watch:
        keys = await changes_until(watch, "/a/last")
    assert (keys[0], len(keys)) == ("/a/first", 1502)


async def test_watch_joins_fragmented_responses(client: EtcdClient) -> None:
    revision = await client.put("/a/0", b"")
    for key in ("/a/1", "/a/2", "/a/3", "/a/4"):  # etcd splits responses above 2 MB
        await client.put(key, b"x" * 1_000_000)
    async with aclosing(client.watch("/a/", revision)) as watch:
        assert await changes_until(watch, "/a/4") == ["/a/0", "/a/1", "/a/2", "/a/3", "/a/4"]


async def test_watch_from_compacted_revision_raises_compacted(etcd: Etcd, client: EtcdClient) -> None:
    await client.put("/a", b"1")
    await client.put("/a", b"2")
    last = await client.put("/a", b"3")
    await compact(etcd, last)
    async with aclosing(client.watch("/a", 2)) as watch:
        with pytest.raises(Compacted, match=f"before revision {last}; list again"):
            await changes_until(watch, "/a")


async def test_watch_from_future_revision_raises_compacted(client: EtcdClient) -> None:
    async with aclosing(client.watch("/a", 1000)) as watch:
        with pytest.raises(Compacted, match="behind the known 999"):
            await anext(watch)


async def test_idle_watch_stays_open_and_hung_server_is_detected(etcd: Etcd, client: EtcdClient) -> None:
    async with aclosing(client.watch("/a", 1)) as watch:
        await anext(watch)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.wait({reading}, timeout=8)  # longer than a watch may be silent
        assert not reading.done()
        await client.put("/a", b"1")
        assert (await reading).changes == (KeyChange("/a", b"1"),)
        async with suspended(etcd.process.pid):
            async with asyncio.timeout(10):
                # Either the watch's timeout or a gRPC ping detects the hang first. In either case gRPC
                # may drop the connection, so there are several possible errors.
                with pytest.raises(PdError, match=r"has been silent for 6 s|is unreachable|was dropped"):
                    await anext(watch)
            with pytest.raises(PdError, match=r"did not answer in time|is unreachable|was dropped"):
                await client.get("/a")

    async def answers_again() -> bool:
        with suppress(PdError):  # gRPC pauses between two connect attempts
            return bool(await client.get("/a"))
        return False

    await wait_until(answers_again)


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
    lease = await client.lease_grant(5)
    while True:
        await client.lease_renew(lease)


@pytest.mark.parametrize("use", [_watch, _read, _write, _keep_alive])
async def test_every_call_can_be_cancelled_at_any_moment(
    etcd: Etcd, use: Callable[[EtcdClient], Awaitable[None]]
) -> None:
    tasks_before = asyncio.all_tasks()
    for iterations in range(40):
        async with EtcdClient([etcd.url]) as client:
            task = asyncio.ensure_future(use(client))
            for _ in range(iterations):
                await asyncio.sleep(0)
            task.cancel()
            assert await asyncio.wait({task}, timeout=5) == ({task}, set())
            assert task.cancelled()
    remaining = asyncio.all_tasks() - tasks_before  # gRPC may still be finishing its calls
    if remaining:
        assert (await asyncio.wait(remaining, timeout=5))[1] == set()


async def test_closing_client_ends_its_watches(etcd: Etcd) -> None:
    client = EtcdClient([etcd.url])
    async with aclosing(client.watch("/a", 1)) as watch:
        await anext(watch)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(PdError, match="was lost"):
            await reading


async def test_lease_lives_while_it_is_renewed_and_until_it_is_revoked(client: EtcdClient) -> None:
    lease = await client.lease_grant(2)
    await client.put("/leased", b"1", lease)
    entry = await client.get("/leased")
    assert entry is not None
    assert entry.lease == lease
    for _ in range(3):
        assert await client.lease_renew(lease) >= 1
        await asyncio.sleep(1)
    assert await client.get("/leased") is not None
    await client.lease_revoke(lease)
    await client.lease_revoke(lease)
    assert await client.get("/leased") is None
    assert await client.lease_renew(lease) == 0
    with pytest.raises(LeaseLost, match="it has expired"):
        await client.put("/leased", b"1", lease)


async def test_expired_lease_deletes_its_keys(client: EtcdClient) -> None:
    revision = await client.put("/leased", b"1", await client.lease_grant(1))
    async with aclosing(client.watch("/leased", revision + 1)) as watch:
        assert await changes_until(watch, "/leased") == ["/leased"]


async def test_lease_is_not_renewed_when_etcd_is_dead(etcd: Etcd, client: EtcdClient) -> None:
    lease = await client.lease_grant(2)
    await etcd.kill()
    async with asyncio.timeout(10):
        with pytest.raises(PdError, match="could not be kept alive: PD is unreachable"):
            await client.lease_renew(lease)


async def test_errors_name_the_cause(etcd: Etcd, client: EtcdClient) -> None:
    async with EtcdClient([NOWHERE]) as unreachable_client:
        with pytest.raises(PdError, match=r"no PD member answers: http://127.0.0.1:1 is unreachable"):
            await unreachable_client.get("/a")
        with pytest.raises(PdError, match="is unreachable"):
            await unreachable_client.put("/a", b"")
        with pytest.raises(PdError, match=r"watch on /a was lost: PD at .* is unreachable"):
            await anext(unreachable_client.watch("/a", 1))
    await etcd.kill()
    with pytest.raises(PdError, match="check that PD is running"):
        await client.get("/a")


async def test_silent_address_delays_calls_only_by_its_timeout(etcd: Etcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, but never responds
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with EtcdClient([silent_url, etcd.url]) as client:
            async with asyncio.timeout(4):
                await client.put("/a", b"1")
            async with asyncio.timeout(1):
                assert await client.get("/a")


async def test_rejects_member_of_another_cluster(etcd: Etcd, tmp_path: Path) -> None:
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


async def test_two_of_three_members_are_enough(tmp_path: Path) -> None:
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


async def test_leaves_member_without_leader_at_once(tmp_path: Path) -> None:
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


async def test_reported_members_take_over(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster, EtcdClient(cluster.urls[:1]) as client:
        await client.put("/a", b"1")
        await client._endpoints.set_members(
            [*await client.member_urls(), "https://127.0.0.1:2", "http://no-port", "nonsense"]
        )
        assert set(client._endpoints.urls) == set(cluster.urls)
        await cluster.members[0].kill()
        async with asyncio.timeout(10):
            assert await client.get("/a")
        await client._endpoints.set_members([])
        assert client._endpoints.urls == tuple(cluster.urls[:1])


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
    authority, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with Etcd.start(tmp_path / "etcd", tls=authority.server) as etcd:
        async with EtcdClient([etcd.url], tls=authority.client) as client:
            await client.put("/a", b"1")
            await client._endpoints.set_members(await client.member_urls())
            assert client._endpoints.urls == (etcd.url,)
            async with aclosing(client.watch("/a", 1)) as watch:
                assert await changes_until(watch, "/a") == ["/a"]
        for tls in (
            ClientTls(ca=authority.ca),  # without a client certificate
            foreign.client,  # client and server do not trust each other's CA
            ClientTls(),  # the system's CAs do not include etcd's CA
        ):
            async with EtcdClient([etcd.url], tls=tls) as client:
                with pytest.raises(PdError, match="is unreachable"):
                    await client.get("/a")
        async with EtcdClient([etcd.url.replace("https", "http")]) as client:
            with pytest.raises(PdError, match="is unreachable"):
                await client.get("/a")


async def test_unreadable_key_raises_config_error(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").client
    assert tls.key is not None
    tls.key.unlink()
    with pytest.raises(ConfigError, match=r"client.key: pd.tls.key: cannot be read .*; make it readable"):
        EtcdClient(["https://127.0.0.1:1"], tls=tls)
