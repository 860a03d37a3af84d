"""The members of one etcd cluster: gRPC channels to them, and calls that fail over to the next member."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from controlplane import address as addresses
from controlplane.config.own_tls import ClientTls
from controlplane.errors import ConfigError, OutcomeUnknown, PdError
from controlplane.etcd.stream import EtcdStream, Unanswered, error_from_status, is_cancelled_by_us

CALL_TIMEOUT_SECONDS = 5.0  # for one call, including all attempts on other members
# For an attempt on any member but the last. If the call is not repeatable, this limits only the time to
# connect to the member.
MEMBER_TIMEOUT_SECONDS = 2.0

# Makes a member without a leader return an error at once. Otherwise calls would wait, and watches would be
# silent for ever (etcd-io/etcd api/v3rpc/rpctypes/md.go).
_METADATA = (("hasleader", "true"),)
_UNLIMITED = -1

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # grpcio 1.85 ignores keepalive_timeout_ms
    # etcd closes a connection that sends pings without an open call, but allows any pings during a stream.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # also the timeout of one connect attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", _UNLIMITED),  # we read ranges in pages, events in fragments
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class RpcMethod:
    """The path of a gRPC method, and the message class of its responses."""

    path: str
    reply_type: Any


class EtcdEndpoints:
    """The configured members and those that the cluster reports. The current member gets the next call.

    Responses with another cluster id than that of the first response are rejected: the TiDB servers of
    another cluster must not get our sessions.
    """

    def __init__(self, urls: Sequence[str], tls: ClientTls | None) -> None:
        self._configured_urls = tuple(dict.fromkeys(urls))
        self._urls = self._configured_urls
        self._current_url = self._configured_urls[0]
        self._uses_tls = self._current_url.startswith("https://")
        self._credentials = _credentials(tls or ClientTls()) if self._uses_tls else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._cluster_id = 0

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all members in use, beginning with the configured ones."""
        return self._urls

    async def set_members(self, urls: Iterable[str]) -> None:
        """Use the configured members and those at `urls`, and close the channels to all others."""
        usable = (url for url in urls if self._is_usable(url))
        self._urls = tuple(dict.fromkeys((*self._configured_urls, *usable)))
        if self._current_url not in self._urls:
            self._current_url = self._urls[0]
        for url in self._channels.keys() - set(self._urls):
            await self._channels.pop(url).close()

    def rotate(self, url: str) -> None:
        """Make the next member current after a call to `url` has failed, if `url` is still current."""
        if url == self._current_url:
            self._current_url = self._urls_from_current()[1 % len(self._urls)]

    async def call(
        self, method: RpcMethod, request: Any, *, repeatable: bool, within: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        """Try all members, beginning with the current one, and return the first response.

        The call is retried while the members elect a leader, which takes some seconds. If the call is not
        `repeatable`, another member gets it only if it certainly was not applied. Raises Rejected,
        OutcomeUnknown, or PdError if no member answers.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while True:
            try:
                return await self._call_in_turn(method, request, repeatable, deadline)
            except Unanswered as error:
                pause = random.uniform(0.05, 0.2)
                if not error.may_lack_leader or loop.time() + pause > deadline:
                    raise PdError(
                        f"no PD member answers: {error}; check that PD is running and that pd.urls has"
                        " its addresses"
                    ) from error
            await asyncio.sleep(pause)

    def open_stream(self, method: RpcMethod) -> EtcdStream:
        """Open a two-way stream to the current member."""
        call = self._channel(self._current_url).stream_stream(
            method.path, request_serializer=_serialize, response_deserializer=method.reply_type.FromString
        )
        return EtcdStream(self._current_url, call(metadata=_METADATA))

    def check_cluster_id(self, header: Any) -> None:
        """Raise Unanswered if a response comes from another cluster than earlier responses."""
        if self._cluster_id and header.cluster_id != self._cluster_id:
            raise Unanswered(
                f"belongs to the cluster {header.cluster_id:x}, not to {self._cluster_id:x} as before; if PD"
                " was recreated, restart Tidevoy",
                not_applied=True,
            )
        self._cluster_id = header.cluster_id

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _urls_from_current(self) -> tuple[str, ...]:
        start = self._urls.index(self._current_url)
        return self._urls[start:] + self._urls[:start]

    def _is_usable(self, url: str) -> bool:
        scheme, _, rest = url.partition("://")
        with suppress(ValueError):
            addresses.split(rest)
            return (scheme == "https") == self._uses_tls
        return False

    def _channel(self, url: str) -> grpc.aio.Channel:
        if url not in self._channels:
            target = url.partition("://")[2]
            self._channels[url] = (
                grpc.aio.secure_channel(target, self._credentials, options=_CHANNEL_OPTIONS)
                if self._credentials
                else grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            )
        return self._channels[url]

    async def _call_in_turn(self, method: RpcMethod, request: Any, repeatable: bool, deadline: float) -> Any:
        loop = asyncio.get_running_loop()
        failures: list[str] = []
        may_lack_leader = False
        order = self._urls_from_current()
        for url in order:
            remaining = deadline - loop.time()
            member_timeout = remaining if url == order[-1] else min(remaining, MEMBER_TIMEOUT_SECONDS)
            if remaining <= 0:
                failures.append(f"{url} was not tried before the timeout")
                continue
            try:
                if not repeatable:
                    await self._wait_connected(url, member_timeout)
                    member_timeout = deadline - loop.time()
                reply = await self._call_member(url, method, request, member_timeout)
                self.check_cluster_id(reply.header)
            except Unanswered as error:
                self.rotate(url)
                if not (repeatable or error.not_applied):
                    raise OutcomeUnknown(
                        f"PD at {url} {error}, so it is unknown whether it applied the change; check"
                        " the current state before retrying"
                    ) from error
                failures.append(f"{url} {error}")
                may_lack_leader |= error.may_lack_leader
                continue
            if url in self._urls:  # `set_members` may have removed it meanwhile
                self._current_url = url
            return reply
        raise Unanswered("; ".join(failures), may_lack_leader=may_lack_leader)

    async def _wait_connected(self, url: str, within: float) -> None:
        channel = self._channel(url)
        try:
            async with asyncio.timeout(within):
                while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise Unanswered("is unreachable", not_applied=True)
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise Unanswered(f"did not accept a connection within {within:.1f} s", not_applied=True) from None
        except grpc.aio.UsageError:
            raise Unanswered("was dropped: the connection was closed", not_applied=True) from None

    async def _call_member(self, url: str, method: RpcMethod, request: Any, within: float) -> Any:
        call = self._channel(url).unary_unary(
            method.path, request_serializer=_serialize, response_deserializer=method.reply_type.FromString
        )
        try:
            return await call(request, timeout=within, metadata=_METADATA)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(url, error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            if is_cancelled_by_us():
                raise
            raise Unanswered("was dropped: the connection was closed") from None


def _serialize(message: Any) -> Any:
    return message.SerializeToString()


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    # gRPC has its own CA bundle, but we document that the default is the bundle of the operating system.
    ca = tls.ca or Path(ssl.get_default_verify_paths().cafile or _SYSTEM_CA)
    return grpc.ssl_channel_credentials(
        root_certificates=_read_pem("pd.tls.ca", ca) if tls.ca or ca.is_file() else None,
        private_key=_read_pem("pd.tls.key", tls.key),
        certificate_chain=_read_pem("pd.tls.cert", tls.cert),
    )


def _read_pem(key: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            str(path), key, f"cannot be read ({error.strerror})", "make it readable for Tidevoy's user"
        ) from error
