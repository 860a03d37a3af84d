"""The members of one etcd cluster: channels to them, and calls that move on when one does not answer."""

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
from controlplane.config.settings import ClientTls
from controlplane.errors import ConfigError, PdError, Uncertain
from controlplane.etcd.stream import Exchange, NoAnswer, cancelled_by_us, failure

CALL_SECONDS = 5.0  # for one call, over all members that are tried
SHARE_SECONDS = 2.0  # for one member while others are left to try

# With this, a member that has no leader says so at once instead of waiting or, on a watch, being silent for
# ever (etcd-io/etcd api/v3rpc/rpctypes/md.go).
_METADATA = (("hasleader", "true"),)
_UNLIMITED = -1

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # grpcio 1.85 does not heed keepalive_timeout_ms
    # etcd ends connections that ping without a call on them; while a stream is open they may go on for ever.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # in fact the time that one attempt to connect gets
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", _UNLIMITED),  # pages and fragments bound what etcd sends
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Method:
    """One gRPC method: its path, and the message class of its answers."""

    path: str
    reply: Any


class Members:
    """The configured members and those learned from them. One of them is current and gets the next call.

    The first answer fixes the cluster; a member of another one is never listened to, since what it lists
    belongs to somebody else.
    """

    def __init__(self, urls: Sequence[str], tls: ClientTls | None) -> None:
        self._configured = tuple(dict.fromkeys(urls))
        self._urls = self._configured
        self._current = self._configured[0]
        self._secure = self._current.startswith("https://")
        self._credentials = _credentials(tls or ClientTls()) if self._secure else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._cluster = 0

    @property
    def urls(self) -> tuple[str, ...]:
        """All members that are used, the configured ones first."""
        return self._urls

    async def learn(self, urls: Iterable[str]) -> None:
        """Use these members beside the configured ones, and no other learned ones any more."""
        usable = (url for url in urls if self._usable(url))
        self._urls = tuple(dict.fromkeys((*self._configured, *usable)))
        if self._current not in self._urls:
            self._current = self._urls[0]
        for url in self._channels.keys() - set(self._urls):
            await self._channels.pop(url).close()

    def move_on(self, url: str) -> None:
        """Make the member behind `url` current, if `url` is it: what it was asked for did not succeed."""
        if url == self._current:
            self._current = self._order()[1 % len(self._urls)]

    async def call(
        self, method: Method, request: Any, *, repeatable: bool, within: float = CALL_SECONDS
    ) -> Any:
        """The answer of the first member that gives one, the current one asked first.

        While they elect a leader, which takes some seconds, they are asked again and again.
        A call that is not `repeatable` goes to another member only while it is certain that none has acted on
        it. Refused; PdError when no member answers, Uncertain when the outcome is not known.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while True:
            try:
                return await self._ask_each(method, request, repeatable, deadline)
            except NoAnswer as error:
                pause = random.uniform(0.05, 0.2)
                if not error.electing or loop.time() + pause > deadline:
                    raise PdError(
                        f"no PD member answers: {error}; check that PD runs and pd.urls name it"
                    ) from error
            await asyncio.sleep(pause)

    def open(self, method: Method) -> Exchange:
        """A two-way stream to the current member."""
        call = self._channel(self._current).stream_stream(
            method.path, request_serializer=_serialize, response_deserializer=method.reply.FromString
        )
        return Exchange(self._current, call(metadata=_METADATA))

    def vouch(self, header: Any) -> None:
        """NoAnswer when an answer comes from another cluster than those before it."""
        if self._cluster and header.cluster_id != self._cluster:
            raise NoAnswer(
                f"belongs to the cluster {header.cluster_id:x}, not to {self._cluster:x} as before; if PD was"
                " set up anew, restart Tidevoy",
                untouched=True,
            )
        self._cluster = header.cluster_id

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _order(self) -> tuple[str, ...]:
        start = self._urls.index(self._current)
        return self._urls[start:] + self._urls[:start]

    def _usable(self, url: str) -> bool:
        scheme, _, rest = url.partition("://")
        with suppress(ValueError):
            addresses.split(rest)
            return (scheme == "https") == self._secure
        return False

    def _channel(self, url: str) -> grpc.aio.Channel:
        if url not in self._channels:
            target = url.partition("://")[2]
            self._channels[url] = (
                grpc.aio.secure_channel(target, self._credentials, options=_OPTIONS)
                if self._credentials
                else grpc.aio.insecure_channel(target, options=_OPTIONS)
            )
        return self._channels[url]

    async def _ask_each(self, method: Method, request: Any, repeatable: bool, deadline: float) -> Any:
        loop = asyncio.get_running_loop()
        failures: list[str] = []
        electing = False
        order = self._order()
        for url in order:
            left = deadline - loop.time()
            share = left if url == order[-1] else min(left, SHARE_SECONDS)
            if left <= 0:
                failures.append(f"{url} was not asked, the time was up")
                continue
            try:
                if not repeatable:
                    await self._connected(url, share)
                    share = deadline - loop.time()
                reply = await self._ask(url, method, request, share)
                self.vouch(reply.header)
            except NoAnswer as error:
                self.move_on(url)
                if not (repeatable or error.untouched):
                    raise Uncertain(
                        f"PD at {url} {error}, so it is not known whether it did that; read it back"
                    ) from error
                failures.append(f"{url} {error}")
                electing |= error.electing
                continue
            if url in self._urls:  # it may have been left while it was asked
                self._current = url
            return reply
        raise NoAnswer("; ".join(failures), electing=electing)

    async def _connected(self, url: str, within: float) -> None:
        channel = self._channel(url)
        try:
            async with asyncio.timeout(within):
                while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise NoAnswer("cannot be reached", untouched=True)
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise NoAnswer(f"could not be connected to within {within:.1f} s", untouched=True) from None
        except grpc.aio.UsageError:
            raise NoAnswer("was left: the connection was closed", untouched=True) from None

    async def _ask(self, url: str, method: Method, request: Any, within: float) -> Any:
        call = self._channel(url).unary_unary(
            method.path, request_serializer=_serialize, response_deserializer=method.reply.FromString
        )
        try:
            return await call(request, timeout=within, metadata=_METADATA)
        except grpc.aio.AioRpcError as error:
            raise failure(url, error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise NoAnswer("was left: the connection was closed") from None


def _serialize(message: Any) -> Any:
    return message.SerializeToString()


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    # gRPC brings a CA bundle of its own; what "the system's" means to an operator is the one of the system.
    ca = tls.ca or Path(ssl.get_default_verify_paths().cafile or _SYSTEM_CA)
    return grpc.ssl_channel_credentials(
        root_certificates=_pem("pd.tls.ca", ca) if tls.ca or ca.is_file() else None,
        private_key=_pem("pd.tls.key", tls.key),
        certificate_chain=_pem("pd.tls.cert", tls.cert),
    )


def _pem(key: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            str(path), key, f"cannot be read ({error.strerror})", "make it readable for Tidevoy's user"
        ) from error
