"""The etcd client: reads, writes, transactions, watches and leases, on any member that answers."""

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
from controlplane.etcd.endpoints import CALL_TIMEOUT_SECONDS, MEMBER_TIMEOUT_SECONDS, EtcdEndpoints, RpcMethod
from controlplane.etcd.stream import Rejected, Unanswered
from controlplane.etcd.types import Entry, RangeResult, WatchBatch, decode_key, encode_key, prefix_end

MEMBER_REFRESH_SECONDS = 30.0  # between two requests for the list of members
MEMBER_REFRESH_RETRY_SECONDS = 1.0
_MAX_KEYS_PER_PAGE = 1000  # bounds one response of a long listing

_RANGE = RpcMethod("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse)
_PUT = RpcMethod("/etcdserverpb.KV/Put", rpc_pb2.PutResponse)
_DELETE = RpcMethod("/etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeResponse)
_TXN = RpcMethod("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse)
_GRANT = RpcMethod("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantResponse)
_REVOKE = RpcMethod("/etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeResponse)
_KEEP_ALIVE = RpcMethod("/etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse)
_MEMBERS = RpcMethod("/etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListResponse)

_NO_PUTS: Mapping[str, bytes] = MappingProxyType({})


class EtcdClient:
    """A client of one etcd cluster, bound to the event loop that uses it first.

    Every call ends within 5 s with a response or a PdError. Reads are retried on another member if one is
    down, silent or without a leader; writes only if they certainly were not applied.
    """

    def __init__(self, endpoints: Sequence[str], *, tls: ClientTls | None = None) -> None:
        """`endpoints`: at least one URL, `http(s)://host:port`. Raises ConfigError for unreadable files."""
        self._endpoints = EtcdEndpoints(endpoints, tls)
        self._ttls: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; open watches end with PdError."""
        await self._endpoints.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of the members in use: the configured ones, then those reported by the cluster."""
        return self._endpoints.urls

    async def range(self, prefix: str, *, revision: int = 0) -> RangeResult:
        """Return all keys under `prefix` at `revision` (0: now). Raises Compacted if it is no longer kept."""
        key = encode_key(prefix)
        end = prefix_end(key)
        entries: dict[str, Entry] = {}
        while True:
            request = rpc_pb2.RangeRequest(
                key=key, range_end=end, limit=_MAX_KEYS_PER_PAGE, revision=revision
            )
            reply = await self._range(request)
            revision = revision or reply.header.revision
            entries.update((decode_key(kv.key), _to_entry(kv)) for kv in reply.kvs)
            if not reply.more:
                return RangeResult(MappingProxyType(entries), revision)
            key = reply.kvs[-1].key + b"\0"

    async def get(self, key: str, *, within: float = CALL_TIMEOUT_SECONDS) -> Entry | None:
        """Return one key, or None if it does not exist."""
        reply = await self._range(rpc_pb2.RangeRequest(key=encode_key(key)), within)
        return _to_entry(reply.kvs[0]) if reply.kvs else None

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write one key and return the revision of the write. Raises LeaseLost if `lease` has expired."""
        request = rpc_pb2.PutRequest(key=encode_key(key), value=value, lease=lease)
        return cast(int, (await self._write(_PUT, request, lease)).header.revision)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key, or all keys that begin with it, and return how many were deleted."""
        encoded = encode_key(key)
        request = rpc_pb2.DeleteRangeRequest(key=encoded, range_end=prefix_end(encoded) if prefix else b"")
        return cast(int, (await self._write(_DELETE, request)).deleted)

    async def txn(
        self,
        expect: Mapping[str, int],
        *,
        puts: Mapping[str, bytes] = _NO_PUTS,
        deletes: Collection[str] = (),
        lease: int = 0,
        within: float = CALL_TIMEOUT_SECONDS,
    ) -> int | None:
        """Write and delete atomically; return the revision, or None if an expectation did not hold.

        `expect` gives the `mod_revision` that keys must have; 0: the key must not exist. `lease` applies to
        the `puts`. Raises LeaseLost if it has expired.
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
        """Yield every change under `prefix` from `start_revision` on; see `controlplane.etcd.watch.watch`.

        Close the generator (`contextlib.aclosing`) if it is abandoned before its end.
        """
        return watching.watch(self._endpoints, prefix, start_revision)

    async def member_urls(self) -> list[str]:
        """Return the client URLs that the members advertise, without learners, which serve no reads."""
        reply = await self._endpoints.call(_MEMBERS, rpc_pb2.MemberListRequest(), repeatable=True)
        return [url for member in reply.members if not member.isLearner for url in member.clientURLs]

    async def set_members(self, urls: Sequence[str]) -> None:
        """Use these members besides the configured ones, and drop all others."""
        await self._endpoints.set_members(urls)

    async def keep_members_current(self) -> None:
        """Refresh the list of members from the cluster periodically until cancelled."""
        while True:
            try:
                await self.set_members(await self.member_urls())
                pause = MEMBER_REFRESH_SECONDS
            except PdError:
                # Other users of this client get and report the same error.
                pause = MEMBER_REFRESH_RETRY_SECONDS
            await asyncio.sleep(pause)

    async def lease_grant(self, ttl: int) -> int:
        """Grant a lease of about `ttl` seconds; etcd's minimum is 1.5 times its election timeout."""
        # Repeatable: if two are granted, the unused one expires.
        reply = await self._endpoints.call(_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl), repeatable=True)
        self._ttls[reply.ID] = reply.TTL
        return cast(int, reply.ID)

    async def lease_keepalive(self, lease: int) -> None:
        """Keep a lease alive until cancelled. Raises LeaseLost if it expired or was not renewed in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._ttls.get(lease, 0)
        while True:
            sent_at = loop.time()
            try:
                ttl = await self._renew(lease)
            except (Unanswered, Rejected) as error:
                if loop.time() >= end:
                    self._ttls.pop(lease, None)
                    raise LeaseLost(lease, f"it could not be kept alive in time ({error})") from error
                await asyncio.sleep(random.uniform(0.1, 0.3))
                continue
            if ttl <= 0:
                self._ttls.pop(lease, None)
                raise LeaseLost(lease, "it has expired")
            end = sent_at + ttl
            await asyncio.sleep(ttl / 3)

    async def lease_renew(self, lease: int) -> int:
        """Renew a lease once and return its remaining seconds; 0: it has expired. Raises PdError."""
        try:
            return max(0, await self._renew(lease))
        except Unanswered as error:
            raise PdError(f"the lease {lease:x} could not be kept alive: PD {error}") from error

    async def lease_revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its keys; an expired lease is no error."""
        self._ttls.pop(lease, None)
        try:
            await self._endpoints.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease), repeatable=True)
        except Rejected as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def _range(self, request: Any, within: float = CALL_TIMEOUT_SECONDS) -> Any:
        try:
            return await self._endpoints.call(_RANGE, request, repeatable=True, within=within)
        except Rejected as error:
            if error.code is grpc.StatusCode.OUT_OF_RANGE:
                raise Compacted(0, f"PD no longer has revision {request.revision}") from error
            raise

    async def _write(
        self, method: RpcMethod, request: Any, lease: int = 0, within: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        try:
            return await self._endpoints.call(method, request, repeatable=False, within=within)
        except Rejected as error:
            if lease and error.code is grpc.StatusCode.NOT_FOUND:
                raise LeaseLost(lease, "it has expired") from error
            raise

    async def _renew(self, lease: int) -> int:
        stream = self._endpoints.open_stream(_KEEP_ALIVE)
        try:
            await stream.send(rpc_pb2.LeaseKeepAliveRequest(ID=lease), MEMBER_TIMEOUT_SECONDS)
            reply = await stream.receive(MEMBER_TIMEOUT_SECONDS)
            if reply is None:
                raise Unanswered("did not answer in time")
            self._endpoints.check_cluster_id(reply.header)
            return cast(int, reply.TTL)
        except Unanswered:
            self._endpoints.rotate(stream.url)
            raise
        finally:
            await stream.close()


def _to_entry(kv: Any) -> Entry:
    return Entry(kv.value, kv.mod_revision, kv.lease)
