"""The etcd client: reads, writes, transactions, watches and leases, on whichever member answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self, cast

import grpc

from controlplane.config.settings import ClientTls
from controlplane.errors import Compacted, LeaseLost, PdError
from controlplane.etcd import rpc_pb2
from controlplane.etcd import watch as watching
from controlplane.etcd.endpoints import CALL_SECONDS, SHARE_SECONDS, Members, Method
from controlplane.etcd.stream import NoAnswer, Refused
from controlplane.etcd.types import Entry, Listing, WatchBatch, decode_key, encode_key, prefix_end

LEARN_SECONDS = 30.0  # between two looks at who the members are
LEARN_RETRY_SECONDS = 1.0
_PAGE = 1000  # keys; bounds one answer of a long list

_RANGE = Method("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse)
_PUT = Method("/etcdserverpb.KV/Put", rpc_pb2.PutResponse)
_DELETE = Method("/etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeResponse)
_TXN = Method("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse)
_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantResponse)
_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeResponse)
_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse)
_MEMBERS = Method("/etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListResponse)

_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class EtcdClient:
    """A client of one etcd cluster, for the event loop that uses it first.

    Every call ends within 5 s with an answer or a PdError. Reads go to another member when one is down,
    silent or without a leader; writes only while it is certain that they were not carried out.
    """

    def __init__(self, endpoints: Sequence[str], *, tls: ClientTls | None = None) -> None:
        """`endpoints`: at least one URL, `http(s)://host:port`. ConfigError: unreadable file in `tls`."""
        self._members = Members(endpoints, tls)
        self._ttls: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; watches that are open end with PdError."""
        await self._members.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members in use: those configured, then those learned."""
        return self._members.urls

    async def range(self, prefix: str, *, revision: int = 0) -> Listing:
        """All keys under `prefix` as of `revision`, 0: now. Compacted when that one is no longer kept."""
        key = encode_key(prefix)
        end = prefix_end(key)
        entries: dict[str, Entry] = {}
        while True:
            request = rpc_pb2.RangeRequest(key=key, range_end=end, limit=_PAGE, revision=revision)
            reply = await self._range(request)
            revision = revision or reply.header.revision
            entries.update((decode_key(kv.key), _entry(kv)) for kv in reply.kvs)
            if not reply.more:
                return Listing(MappingProxyType(entries), revision)
            key = reply.kvs[-1].key + b"\0"

    async def get(self, key: str, *, within: float = CALL_SECONDS) -> Entry | None:
        """One key, or None when it is not there."""
        reply = await self._range(rpc_pb2.RangeRequest(key=encode_key(key)), within)
        return _entry(reply.kvs[0]) if reply.kvs else None

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write one key; the revision of that. LeaseLost when `lease` has ended."""
        request = rpc_pb2.PutRequest(key=encode_key(key), value=value, lease=lease)
        return cast(int, (await self._write(_PUT, request, lease)).header.revision)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key, or all keys that begin with it; how many there were."""
        first = encode_key(key)
        request = rpc_pb2.DeleteRangeRequest(key=first, range_end=prefix_end(first) if prefix else b"")
        return cast(int, (await self._write(_DELETE, request)).deleted)

    async def txn(
        self,
        expect: Mapping[str, int],
        *,
        puts: Mapping[str, bytes] = _NOTHING,
        deletes: Collection[str] = (),
        lease: int = 0,
        within: float = CALL_SECONDS,
    ) -> int | None:
        """Write and delete all or nothing; the revision, or None when an expectation did not hold.

        `expect` gives the `mod_revision` that keys must have, 0: the key must not be there. `lease` is that
        of the `puts`; LeaseLost when it has ended.
        """
        request = rpc_pb2.TxnRequest(
            compare=[
                rpc_pb2.Compare(
                    result=rpc_pb2.Compare.EQUAL,
                    target=rpc_pb2.Compare.MOD,
                    key=encode_key(key),
                    mod_revision=revision,
                )
                for key, revision in expect.items()
            ],
            success=[
                rpc_pb2.RequestOp(
                    request_put=rpc_pb2.PutRequest(key=encode_key(key), value=value, lease=lease)
                )
                for key, value in puts.items()
            ]
            + [
                rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=encode_key(key)))
                for key in deletes
            ],
        )
        reply = await self._write(_TXN, request, lease, within)
        return reply.header.revision if reply.succeeded else None

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Every change under `prefix` from `start_revision` on; see `controlplane.etcd.watch.watch`.

        Close it (`contextlib.aclosing`) when it is left before its end.
        """
        return watching.watch(self._members, prefix, start_revision)

    async def members(self) -> list[str]:
        """The client URLs that the members advertise, without those of learners: they serve no reads."""
        reply = await self._members.call(_MEMBERS, rpc_pb2.MemberListRequest(), repeatable=True)
        return [url for member in reply.members if not member.isLearner for url in member.clientURLs]

    async def learn(self, urls: Sequence[str]) -> None:
        """Use these members beside the configured ones, and leave others that were learned before."""
        await self._members.learn(urls)

    async def keep_learning(self) -> None:
        """Use the members that the cluster has, whoever comes and goes, until cancelled."""
        while True:
            try:
                await self.learn(await self.members())
                pause = LEARN_SECONDS
            except PdError:
                pause = LEARN_RETRY_SECONDS  # whoever else uses this client finds the same, and tells it
            await asyncio.sleep(pause)

    async def lease_grant(self, ttl: int) -> int:
        """A new lease of about `ttl` seconds; etcd grants none shorter than 1.5 of its election timeouts."""
        # Repeatable: should two be granted, the one that nobody knows of runs out.
        reply = await self._members.call(_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl), repeatable=True)
        self._ttls[reply.ID] = reply.TTL
        return cast(int, reply.ID)

    async def lease_keepalive(self, lease: int) -> None:
        """Keep a lease of ours alive until cancelled. LeaseLost: it ended, or nobody answered in its time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._ttls.get(lease, 0)
        while True:
            asked = loop.time()
            try:
                ttl = await self._renew(lease)
            except (NoAnswer, Refused) as error:
                if loop.time() >= end:
                    self._ttls.pop(lease, None)
                    raise LeaseLost(lease, f"it could not be kept alive in time ({error})") from error
                await asyncio.sleep(random.uniform(0.1, 0.3))
                continue
            if ttl <= 0:
                self._ttls.pop(lease, None)
                raise LeaseLost(lease, "it has ended")
            end = asked + ttl
            await asyncio.sleep(ttl / 3)

    async def lease_renew(self, lease: int) -> int:
        """Keep a lease alive once; the seconds that it has from now on, 0: it has ended. PdError."""
        try:
            return max(0, await self._renew(lease))
        except NoAnswer as error:
            raise PdError(f"the lease {lease:x} could not be kept alive: PD {error}") from error

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and delete its keys; one that has ended already is fine."""
        self._ttls.pop(lease, None)
        try:
            await self._members.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease), repeatable=True)
        except Refused as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def _range(self, request: Any, within: float = CALL_SECONDS) -> Any:
        try:
            return await self._members.call(_RANGE, request, repeatable=True, within=within)
        except Refused as error:
            if error.code is grpc.StatusCode.OUT_OF_RANGE:
                raise Compacted(0, f"PD no longer has revision {request.revision}") from error
            raise

    async def _write(self, method: Method, request: Any, lease: int = 0, within: float = CALL_SECONDS) -> Any:
        try:
            return await self._members.call(method, request, repeatable=False, within=within)
        except Refused as error:
            if lease and error.code is grpc.StatusCode.NOT_FOUND:
                raise LeaseLost(lease, "it has ended") from error
            raise

    async def _renew(self, lease: int) -> int:
        exchange = self._members.open(_KEEP_ALIVE)
        try:
            await exchange.send(rpc_pb2.LeaseKeepAliveRequest(ID=lease), SHARE_SECONDS)
            reply = await exchange.receive(SHARE_SECONDS)
            if reply is None:
                raise NoAnswer("did not answer in time")
            self._members.vouch(reply.header)
            return cast(int, reply.TTL)
        except NoAnswer:
            self._members.move_on(exchange.url)
            raise
        finally:
            await exchange.close()


def _entry(kv: Any) -> Entry:
    return Entry(kv.value, kv.mod_revision, kv.lease)
