"""Opens channels to other replicas, and follows their feeds over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from controlplane.config.own_tls import ServerTls
from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.peer_feed_server import FOLLOW_METHOD, SERVICE_NAME
from controlplane.replicas.peer_messages import UnreadableMessage

_RECEIVE_TIMEOUT_SECONDS = 5.0  # a replica sends its fleet every second
_CHANNEL_OPTIONS = (
    # A new connection for each call, so that gRPC's own reconnect backoff does not apply.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
)


async def receive_messages(
    address: str, tls: ServerTls | None, name: str, on_message: Callable[[bytes], None]
) -> str:
    """Follow the replica at `address` as `name`; `on_message` gets each serialized message.

    When the stream ends, return the reason as a clause about the replica.
    """
    try:
        channel = await open_channel(address, tls)
    except OSError as error:
        return f"cannot be followed, because {error.filename} cannot be read: {error.strerror}"
    async with channel:
        follow = channel.unary_stream(
            f"/{SERVICE_NAME}/{FOLLOW_METHOD}",
            request_serializer=peer_feed_pb2.FollowRequest.SerializeToString,
            response_deserializer=peer_feed_pb2.MessageBatch.FromString,
        )
        call = follow(peer_feed_pb2.FollowRequest(name=name))
        try:
            while True:
                async with asyncio.timeout(_RECEIVE_TIMEOUT_SECONDS):
                    batch = await call.read()
                if batch is grpc.aio.EOF:
                    return f"ended the stream: {await call.details() or (await call.code()).name}"
                for message in batch.messages:
                    on_message(message)
        except TimeoutError:
            return f"has sent nothing for {_RECEIVE_TIMEOUT_SECONDS:g} s"
        except UnreadableMessage as error:
            return f"sent an unreadable message: {error}"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return f"denied access: {error.details()}"
            return f"is unreachable ({error.details() or error.code().name})"
        finally:
            call.cancel()


async def open_channel(address: str, tls: ServerTls | None) -> grpc.aio.Channel:
    """Return a channel to a replica. Each call reads the files of `tls` again. Raises OSError."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    credentials = await asyncio.to_thread(_read_credentials, tls)
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def _read_credentials(tls: ServerTls) -> grpc.ChannelCredentials:
    """Use the server certificate as client certificate."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.client_ca.read_bytes() if tls.client_ca is not None else None,
        private_key=tls.key.read_bytes(),
        certificate_chain=tls.cert.read_bytes(),
    )
