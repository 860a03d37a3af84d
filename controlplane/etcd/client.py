"""The etcd client: reads, writes, transactions, watches and leases on any available member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, cast

import grpc

from controlplane.config.own_tls import ClientTls
from controlplane.errors import LeaseLost, PdError
from controlplane.etcd import rpc_pb2
from controlplane.etcd import watch as watching
from controlplane.etcd.endpoints import CALL_TIMEOUT_SECONDS, MEMBER_TIMEOUT_SECONDS, EtcdEndpoints, RpcMethod
from controlplane.etcd.stream import Rejected, Unanswered
from controlplane.etcd.types import Entry, RangeResult, WatchBatch, decode_key, prefix_end

MEMBER_REFRESH_SECONDS = 30.0  # interval of requests for the list of members
MEMBER_REFRESH_RETRY_SECONDS = 1.0
_MAX_KEYS_PER_PAGE = 1000  # limits the size of one response

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

    Every call ends within 5 s with a response or a PdError. If a member is down, silent or without a leader,
    the next member gets the call. A write is only repeated if it certainly was not applied.
    """

    def __init__(self, endpoints: Sequence[str], *, tls: ClientTls | None = None) -> None:
        """`endpoints`: at least one URL, `http(s)://host:port`. Raises ConfigError for bad TLS files."""
        self._endpoints = EtcdEndpoints(endpoints, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; open watches end with PdError."""
        await self._endpoints.close()

    async def range(self, prefix: str) -> RangeResult:
        """Return all keys under `prefix` at one revision."""
        revision = 0  # later pages are read at the revision of the first page
        key = prefix.encode()
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
        reply = await self._range(rpc_pb2.RangeRequest(key=key.encode()), within)
        return _to_entry(reply.kvs[0]) if reply.kvs else None

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write one key and return the revision of the write. Raises LeaseLost if `lease` has expired."""
        request = rpc_pb2.PutRequest(key=key.encode(), value=value, lease=lease)
        return cast(int, (await self._write(_PUT, request, lease)).header.revision)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key, or with `prefix` all keys that begin with it, and return how many were deleted."""
        encoded = key.encode()
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
        """Write and delete atomically and return the revision; return None if `expect` is not met.

        `expect` maps keys to the `mod_revision` that each must have; 0 means that the key must not exist.
        `lease` is the lease of the written keys. Raises LeaseLost if the lease has expired.
        """
        compare = [
            rpc_pb2.Compare(
                result=rpc_pb2.Compare.EQUAL,
                target=rpc_pb2.Compare.MOD,
                key=key.encode(),
                mod_revision=revision,
            )
            for key, revision in expect.items()
        ]
        writes = [
            rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key.encode(), value=value, lease=lease))
            for key, value in puts.items()
        ]
        writes += [
            rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key.encode()))
            for key in deletes
        ]
        request = rpc_pb2.TxnRequest(compare=compare, success=writes)
        reply = await self._write(_TXN, request, lease, within)
        return reply.header.revision if reply.succeeded else None

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield every change under `prefix` from `start_revision` on; see `controlplane.etcd.watch.watch`.

        Use `contextlib.aclosing`, so that the stream is closed when the iteration stops early.
        """
        return watching.watch(self._endpoints, prefix, start_revision)

    async def member_urls(self) -> list[str]:
        """Return the client URLs of all members except learners, which serve no reads."""
        reply = await self._endpoints.call(_MEMBERS, rpc_pb2.MemberListRequest(), repeatable=True)
        return [url for member in reply.members if not member.isLearner for url in member.clientURLs]

    async def keep_members_current(self) -> None:
        """Refresh the list of members periodically until cancelled."""
        while True:
            try:
                await self._endpoints.set_members(await self.member_urls())
                pause = MEMBER_REFRESH_SECONDS
            except PdError:
                # Other users of this client get and report the same error.
                pause = MEMBER_REFRESH_RETRY_SECONDS
            await asyncio.sleep(pause)

    async def lease_grant(self, ttl: int) -> int:
        """Grant a lease of `ttl` seconds (or etcd's minimum, 1.5 election timeouts) and return its id."""
        # Repeatable: if a repetition grants a second lease, the unused lease expires.
        reply = await self._endpoints.call(_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl), repeatable=True)
        return cast(int, reply.ID)

    async def lease_renew(self, lease: int) -> int:
        """Renew a lease once and return its remaining seconds, 0 if it has expired. Raises PdError."""
        stream = self._endpoints.open_stream(_KEEP_ALIVE)
        try:
            await stream.send(rpc_pb2.LeaseKeepAliveRequest(ID=lease), MEMBER_TIMEOUT_SECONDS)
            reply = await stream.receive(MEMBER_TIMEOUT_SECONDS)
            if reply is None:
                raise Unanswered("did not answer in time")
            self._endpoints.check_cluster_id(reply.header)
            return max(0, cast(int, reply.TTL))
        except Unanswered as error:
            self._endpoints.rotate(stream.url)
            raise PdError(f"the lease {lease:x} could not be kept alive: PD {error}") from error
        finally:
            await stream.close()

    async def lease_revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its keys. An expired lease is not an error."""
        try:
            await self._endpoints.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease), repeatable=True)
        except Rejected as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def _range(self, request: Any, within: float = CALL_TIMEOUT_SECONDS) -> Any:
        return await self._endpoints.call(_RANGE, request, repeatable=True, within=within)

    async def _write(
        self, method: RpcMethod, request: Any, lease: int = 0, within: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        try:
            return await self._endpoints.call(method, request, repeatable=False, within=within)
        except Rejected as error:
            if lease and error.code is grpc.StatusCode.NOT_FOUND:
                raise LeaseLost(lease, "it has expired") from error
            raise


def _to_entry(kv: Any) -> Entry:
    return Entry(kv.value, kv.mod_revision, kv.lease)
