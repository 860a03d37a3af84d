"""A watch on one prefix: yields batches of changes, and fails as soon as the stream is unreliable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from controlplane.errors import Compacted, PdError
from controlplane.etcd import rpc_pb2
from controlplane.etcd.endpoints import CALL_TIMEOUT_SECONDS, EtcdEndpoints, RpcMethod
from controlplane.etcd.stream import EtcdStream, Unanswered
from controlplane.etcd.types import KeyChange, WatchBatch, decode_key, encode_key, prefix_end

IDLE_BEFORE_PROGRESS_SECONDS = 3.0  # after this silence, the member is asked for the watch's progress
PROGRESS_TIMEOUT_SECONDS = 3.0  # for the response to that

_WATCH = RpcMethod("/etcdserverpb.Watch/Watch", rpc_pb2.WatchResponse)
_WATCH_ID = 1  # chosen here; responses to progress requests carry another id


async def watch(
    endpoints: EtcdEndpoints, prefix: str, start_revision: int
) -> AsyncGenerator[WatchBatch, None]:
    """Yield every change under `prefix` from `start_revision` on, from the current member of `endpoints`.

    Raises Compacted if the changes from there on are no longer available, PdError if the stream is lost: then
    another member is current, and a new watch from the revision after the last batch misses nothing.
    """
    stream = endpoints.open_stream(_WATCH)
    try:
        await stream.send(_create_request(prefix, start_revision), CALL_TIMEOUT_SECONDS)
        created = await stream.receive(CALL_TIMEOUT_SECONDS)
        if created is None:
            raise Unanswered("did not answer in time")
        endpoints.check_cluster_id(created.header)
        _raise_if_ended(created)
        # A store that was restored from a backup or recreated counts from a lower revision: the watch would
        # be silent until it has caught up. A lagging member looks the same; listing again is right in both
        # cases.
        known_revision, current_revision = start_revision - 1, created.header.revision
        if current_revision < known_revision:
            raise Compacted(
                0,
                f"PD at {stream.url} is at revision {current_revision}, behind the known {known_revision}",
            )
        yield WatchBatch(known_revision)
        events: list[Any] = []
        while True:
            reply = await _next_reply(stream)
            _raise_if_ended(reply)
            events.extend(reply.events)
            if reply.fragment:
                continue  # the next response has the rest of the revision
            if events:
                yield WatchBatch(max(event.kv.mod_revision for event in events), _to_changes(events))
                events = []
            elif reply.watch_id == _WATCH_ID:
                # Only these are reliable: a requested progress notification can run ahead of the events
                # (etcd-io/etcd issue 15220).
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
    key = encode_key(prefix)
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


def _raise_if_ended(reply: Any) -> None:
    if reply.compact_revision:
        raise Compacted(
            reply.compact_revision, f"PD has compacted the changes before revision {reply.compact_revision}"
        )
    if reply.canceled:
        raise Unanswered(f"cancelled it ({reply.cancel_reason or 'no reason given'})")


def _to_changes(events: Sequence[Any]) -> tuple[KeyChange, ...]:
    return tuple(
        KeyChange(
            decode_key(event.kv.key),
            event.kv.value if event.type == rpc_pb2.Event.PUT else None,
            event.kv.mod_revision,
        )
        for event in events
    )
