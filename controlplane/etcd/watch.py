"""One watch on one prefix: batches as they happen, and a certain end when the stream cannot be trusted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from controlplane.errors import Compacted, PdError
from controlplane.etcd import rpc_pb2
from controlplane.etcd.endpoints import CALL_SECONDS, Members, Method
from controlplane.etcd.stream import Exchange, NoAnswer
from controlplane.etcd.types import Change, WatchBatch, decode_key, encode_key, prefix_end

IDLE_SECONDS = 3.0  # of silence, after which the member is asked whether the watch is still served
ANSWER_SECONDS = 3.0  # that it has to answer that

_WATCH = Method("/etcdserverpb.Watch/Watch", rpc_pb2.WatchResponse)
_WATCH_ID = 1  # ours; answers to progress requests carry another one


async def watch(members: Members, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
    """Every change under `prefix` from `start_revision` on, from the current member of `members`.

    Compacted when the changes from there on are not to be had; PdError when the stream is lost: then another
    member is current, and a new watch from the revision behind the last batch misses nothing.
    """
    exchange = members.open(_WATCH)
    try:
        await exchange.send(_create(prefix, start_revision), CALL_SECONDS)
        created = await exchange.receive(CALL_SECONDS)
        if created is None:
            raise NoAnswer("did not answer in time")
        members.vouch(created.header)
        _check(created)
        # A store that was restored from a backup or begun anew counts from a lower revision: the watch would
        # be silent until it has caught up. A member that lags behind looks the same; to list again is right
        # in both cases.
        seen, now = start_revision - 1, created.header.revision
        if now < seen:
            raise Compacted(0, f"PD at {exchange.url} is at revision {now}, behind {seen}, which was seen")
        yield WatchBatch(seen)
        events: list[Any] = []
        while True:
            reply = await _next(exchange)
            _check(reply)
            events.extend(reply.events)
            if reply.fragment:
                continue  # the rest of a revision comes in the next answer
            if events:
                yield WatchBatch(max(event.kv.mod_revision for event in events), _changes(events))
                events = []
            elif reply.watch_id == _WATCH_ID:
                # Only these may be believed: progress that was asked for can run ahead of the events
                # (etcd-io/etcd issue 15220).
                yield WatchBatch(reply.header.revision)
    except NoAnswer as error:
        members.move_on(exchange.url)
        raise PdError(f"the watch on {prefix} was lost: PD at {exchange.url} {error}") from error
    finally:
        await exchange.close()


async def _next(exchange: Exchange) -> Any:
    reply = await exchange.receive(IDLE_SECONDS)
    if reply is None:
        progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
        await exchange.send(progress, ANSWER_SECONDS)
        reply = await exchange.receive(ANSWER_SECONDS)
    if reply is None:
        raise NoAnswer(f"has been silent for {IDLE_SECONDS + ANSWER_SECONDS:g} s")
    return reply


def _create(prefix: str, start_revision: int) -> Any:
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


def _check(reply: Any) -> None:
    if reply.compact_revision:
        raise Compacted(
            reply.compact_revision, f"PD has forgotten the changes before revision {reply.compact_revision}"
        )
    if reply.canceled:
        raise NoAnswer(f"ended it ({reply.cancel_reason or 'it gave no reason'})")


def _changes(events: Sequence[Any]) -> tuple[Change, ...]:
    return tuple(
        Change(
            decode_key(event.kv.key),
            event.kv.value if event.type == rpc_pb2.Event.PUT else None,
            event.kv.mod_revision,
        )
        for event in events
    )
