"""A watch on one prefix, which yields batches of changes and fails as soon as its stream is unreliable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from controlplane.errors import Compacted, PdError
from controlplane.etcd import rpc_pb2
from controlplane.etcd.endpoints import CALL_TIMEOUT_SECONDS, EtcdEndpoints, RpcMethod
from controlplane.etcd.stream import EtcdStream, Rejected, Unanswered
from controlplane.etcd.types import KeyChange, WatchBatch, decode_key, prefix_end

IDLE_BEFORE_PROGRESS_SECONDS = 3.0  # silence after which we request a progress notification
PROGRESS_TIMEOUT_SECONDS = 3.0  # time limit for the requested notification

_WATCH = RpcMethod("/etcdserverpb.Watch/Watch", rpc_pb2.WatchResponse)
_WATCH_ID = 1  # chosen here; requested progress notifications have another id


async def watch(
    endpoints: EtcdEndpoints, prefix: str, start_revision: int
) -> AsyncGenerator[WatchBatch, None]:
    """Yield every change under `prefix` from `start_revision` on, as the current member reports it.

    Raises Compacted if these changes are no longer available. Raises PdError if the stream is lost: a new
    watch then uses another member, and misses nothing if it starts after the revision of the last batch.
    """
    stream = endpoints.open_stream(_WATCH)
    try:
        await stream.send(_create_request(prefix, start_revision), CALL_TIMEOUT_SECONDS)
        created = await stream.receive(CALL_TIMEOUT_SECONDS)
        if created is None:
            raise Unanswered("did not answer in time")
        endpoints.check_cluster_id(created.header)
        _raise_if_ended(stream.url, created)
        # The revision of a recreated or restored store may be lower than the known revision: a watch would be
        # silent until the store reaches `start_revision`. A lagging member looks the same. The caller lists
        # all keys again after Compacted.
        known_revision, current_revision = start_revision - 1, created.header.revision
        if current_revision < known_revision:
            raise Compacted(
                f"PD at {stream.url} is at revision {current_revision}, behind the known {known_revision}"
            )
        yield WatchBatch(known_revision)
        events: list[Any] = []
        while True:
            reply = await _next_reply(stream)
            _raise_if_ended(stream.url, reply)
            events.extend(reply.events)
            if reply.fragment:
                continue  # the next response continues this revision
            if events:
                yield WatchBatch(max(event.kv.mod_revision for event in events), _to_changes(events))
                events = []
            elif reply.watch_id == _WATCH_ID:
                # Only notifications with our watch id are reliable. A requested notification may come before
                # events of its revision (etcd-io/etcd issue 15220).
                yield WatchBatch(reply.header.revision)
    except Unanswered as error:
        endpoints.rotate(stream.url)
        raise PdError(f"the watch on {prefix} was lost: PD at {stream.url} {error}") from error
    finally:
        await stream.close()


async def _next_reply(stream: EtcdStream) -> Any:
    reply = await stream.receive(IDLE_BEFORE_PROGRESS_SECONDS)
    if reply is None:
        progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
        await stream.send(progress, PROGRESS_TIMEOUT_SECONDS)
        reply = await stream.receive(PROGRESS_TIMEOUT_SECONDS)
    if reply is None:
        raise Unanswered(f"has been silent for {IDLE_BEFORE_PROGRESS_SECONDS + PROGRESS_TIMEOUT_SECONDS:g} s")
    return reply


def _create_request(prefix: str, start_revision: int) -> Any:
    key = prefix.encode()
    return rpc_pb2.WatchRequest(
        create_request=rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=prefix_end(key),
            start_revision=start_revision,
            progress_notify=True,
            watch_id=_WATCH_ID,
            fragment=True,
        )
    )


def _raise_if_ended(url: str, reply: Any) -> None:
    if reply.compact_revision:
        raise Compacted(f"PD has compacted the changes before revision {reply.compact_revision}")
    if reply.canceled:
        reason = reply.cancel_reason or "no reason given"
        if "permission denied" in reason:  # etcd sends no code (server/etcdserver/api/v3rpc/watch.go)
            raise Rejected(url, grpc.StatusCode.PERMISSION_DENIED, reason)
        raise Unanswered(f"cancelled it ({reason})")


def _to_changes(events: Sequence[Any]) -> tuple[KeyChange, ...]:
    return tuple(
        KeyChange(
            decode_key(event.kv.key),
            event.kv.value if event.type == rpc_pb2.Event.PUT else None,
            event.kv.mod_revision,
        )
        for event in events
    )
