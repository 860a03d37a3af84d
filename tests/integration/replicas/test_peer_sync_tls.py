"""Feeds between replicas by mutual TLS: who may hear of all Envoys, and to whom nobody listens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme

from controlplane.config.settings import Settings
from controlplane.replicas import peer_feed_pb2, peer_feed_server
from tests.support.controlplane.peer_sync import FakeReplica
from tests.support.controlplane.xds_certificates import channel_credentials
from tests.support.waiting import wait_until

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def put(directory: Path, name: str, leaf: trustme.LeafCert, ca: trustme.CA) -> dict[str, str]:
    """`xds.tls` with that certificate."""
    files = {key: directory / f"{name}-{key}.pem" for key in ("cert", "key", "client_ca")}
    files["cert"].write_bytes(leaf.cert_chain_pems[0].bytes())
    files["key"].write_bytes(leaf.private_key_pem.bytes())
    files["client_ca"].write_bytes(ca.cert_pem.bytes())
    return {key: str(path) for key, path in files.items()}


@contextlib.asynccontextmanager
async def replicas(
    directory: Path, authority: trustme.CA, **leaves: trustme.LeafCert
) -> AsyncIterator[list[FakeReplica]]:
    """Replicas at HOSTS that know each other, each with a certificate of its host, or the given one."""
    async with contextlib.AsyncExitStack() as stack:
        all_ = []
        for name, host in HOSTS.items():
            tls = put(directory, name, leaves.get(name) or authority.issue_cert(host), authority)
            one = FakeReplica(name, Settings.model_validate({"xds": {"listen": f"{host}:0", "tls": tls}}))
            await one.start()
            stack.push_async_callback(one.stop)
            all_.append(one)
        for one in all_:
            one.peer_sync.set_peers({each.name: f"{HOSTS[each.name]}:{each.xds.port}" for each in all_})
        yield all_


async def refusal_of(station: FakeReplica, caller: grpc.ChannelCredentials) -> grpc.aio.AioRpcError:
    """How a follower with these credentials is refused."""
    async with grpc.aio.secure_channel(f"{HOSTS[station.name]}:{station.xds.port}", caller) as channel:
        call = channel.unary_stream(f"/{peer_feed_server.SERVICE_NAME}/{peer_feed_server.FOLLOW_METHOD}")(
            peer_feed_pb2.FollowRequest(name="x").SerializeToString(), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        return refused.value


async def test_replicas_follow_each_other_by_their_certificates(
    tmp_path: Path, authority: trustme.CA
) -> None:
    async with replicas(tmp_path, authority) as (a, b):
        await a.wait_connected_to(b)
        await b.wait_connected_to(a)


async def test_an_envoy_hears_nothing_of_the_others(tmp_path: Path, authority: trustme.CA) -> None:
    """Its certificate is good for a stream of its own, and for no more."""
    async with replicas(tmp_path, authority) as (a, b):
        await a.wait_connected_to(b)
        refused = await refusal_of(a, channel_credentials(authority, authority.issue_cert("envoy-1.test")))
        assert refused.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "holds the host of no control plane" in (refused.details() or "")
        for leaf in (None, trustme.CA().issue_cert(HOSTS["b"])):
            refused = await refusal_of(a, channel_credentials(authority, leaf))
            assert refused.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_replica_with_the_certificate_of_another_host_is_not_heard_and_may_not_hear(
    tmp_path: Path, authority: trustme.CA
) -> None:
    async with replicas(tmp_path, authority, b=authority.issue_cert("127.0.0.3")) as (a, b):
        await wait_until(
            lambda: "refuses us: the certificate of 127.0.0.1" in b.peer_sync.unreachable().get("a", "")
        )
        await wait_until(lambda: "cannot be heard" in a.peer_sync.unreachable().get("b", ""))
        assert "b" in a.peer_sync.unreachable()


async def test_a_replica_of_another_authority_is_not_heard(tmp_path: Path, authority: trustme.CA) -> None:
    async with replicas(tmp_path, authority, b=trustme.CA().issue_cert(HOSTS["b"])) as (a, b):
        for one, other in ((a, b), (b, a)):
            await wait_until(lambda one=one, other=other: "cannot" in one.peer_sync.unreachable()[other.name])  # type: ignore[misc]


async def test_a_certificate_that_is_renewed_is_shown_at_the_next_try(
    tmp_path: Path, authority: trustme.CA
) -> None:
    async with replicas(tmp_path, authority, b=authority.issue_cert("127.0.0.3")) as (a, b):
        await wait_until(lambda: "refuses us" in b.peer_sync.unreachable().get("a", ""))
        put(tmp_path, "b", authority.issue_cert(HOSTS["b"]), authority)
        await b.wait_connected_to(a)
        await a.wait_connected_to(b)  # its port shows the new one within a second, too
        os.unlink(tmp_path / "b-key.pem")
        await a.stop()
        await wait_until(lambda: "b-key.pem cannot be read" in b.peer_sync.unreachable().get("a", ""))
