"""Peer feeds over mutual TLS: which callers may follow, and which replicas are not followed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import grpc
import pytest
import trustme

from cli.main import run
from controlplane.config.settings import Settings
from controlplane.replicas import peer_feed_pb2, peer_feed_server
from tests.support.controlplane.peer_sync import FakeReplica
from tests.support.controlplane.xds_certificates import channel_credentials
from tests.support.waiting import wait_until

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write_certificate(directory: Path, name: str, leaf: trustme.LeafCert, ca: trustme.CA) -> dict[str, str]:
    """Write the certificate files; return the settings `xds.tls`."""
    files = {key: directory / f"{name}-{key}.pem" for key in ("cert", "key", "client_ca")}
    files["cert"].write_bytes(leaf.cert_chain_pems[0].bytes())
    files["key"].write_bytes(leaf.private_key_pem.bytes())
    files["client_ca"].write_bytes(ca.cert_pem.bytes())
    return {key: str(path) for key, path in files.items()}


@contextlib.asynccontextmanager
async def replicas(
    directory: Path, authority: trustme.CA, **leaves: trustme.LeafCert
) -> AsyncIterator[list[FakeReplica]]:
    """Run replicas at HOSTS that know each other. `leaves` are other certificates for some of them."""
    tls = {
        name: write_certificate(directory, name, leaves.get(name) or authority.issue_cert(host), authority)
        for name, host in HOSTS.items()
    }
    async with replicas_with_files(tls) as started:
        yield started


@contextlib.asynccontextmanager
async def replicas_with_files(tls: Mapping[str, Mapping[str, str]]) -> AsyncIterator[list[FakeReplica]]:
    """Run replicas at HOSTS that know each other. `tls` is the setting `xds.tls` of each."""
    async with contextlib.AsyncExitStack() as stack:
        started = []
        for name, host in HOSTS.items():
            xds = {"listen": f"{host}:0", "tls": tls[name]}
            replica = FakeReplica(name, Settings.model_validate({"xds": xds}))
            await replica.start()
            stack.push_async_callback(replica.stop)
            started.append(replica)
        for replica in started:
            replica.set_peer_addresses(
                {r.name: f"{HOSTS[r.name]}:{r.xds.port}" for r in started if r is not replica}
            )
        yield started


async def follow_error(replica: FakeReplica, caller: grpc.ChannelCredentials) -> grpc.aio.AioRpcError:
    """Return the error that a caller with these credentials gets when it follows this replica."""
    async with grpc.aio.secure_channel(f"{HOSTS[replica.name]}:{replica.xds.port}", caller) as channel:
        call = channel.unary_stream(f"/{peer_feed_server.SERVICE_NAME}/{peer_feed_server.FOLLOW_METHOD}")(
            peer_feed_pb2.FollowRequest(name="x").SerializeToString(), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        return error.value


async def test_replicas_follow_each_other_with_certificates(tmp_path: Path, authority: trustme.CA) -> None:
    async with replicas(tmp_path, authority) as (a, b):
        await a.wait_connected_to(b)
        await b.wait_connected_to(a)


async def test_replicas_follow_each_other_with_the_certificate_that_the_command_issues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [text for host in HOSTS.values() for text in ("--control-plane", host)]
    assert run(["certificates", "init", str(tmp_path / "certificates"), *hosts, "--json"]) == 0
    tls = json.loads(capsys.readouterr().out)["xds"]["tls"]
    async with replicas_with_files(dict.fromkeys(HOSTS, tls)) as (a, b):
        await a.wait_connected_to(b)
        await b.wait_connected_to(a)


async def test_only_certificates_of_replicas_may_follow(tmp_path: Path, authority: trustme.CA) -> None:
    """A certificate of an Envoy or of another authority is rejected, as is a caller without a certificate."""
    async with replicas(tmp_path, authority) as (a, b):
        await a.wait_connected_to(b)
        error = await follow_error(a, channel_credentials(authority, authority.issue_cert("envoy-1.test")))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "names no registered control plane" in (error.details() or "")
        for leaf in (None, trustme.CA().issue_cert(HOSTS["b"])):
            error = await follow_error(a, channel_credentials(authority, leaf))
            assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_certificate_of_another_host_is_rejected_as_client_and_as_server(
    tmp_path: Path, authority: trustme.CA
) -> None:
    async with replicas(tmp_path, authority, b=authority.issue_cert("127.0.0.3")) as (a, b):
        await wait_until(
            lambda: "denied access: the certificate of 127.0.0.1" in b.peer_sync.unreachable().get("a", "")
        )
        await wait_until(lambda: "is unreachable" in a.peer_sync.unreachable().get("b", ""))
        assert "b" in a.peer_sync.unreachable()


def _is_unreachable(replica: FakeReplica, name: str) -> bool:
    return "is unreachable" in replica.peer_sync.unreachable()[name]


async def test_certificate_of_another_authority_is_rejected(tmp_path: Path, authority: trustme.CA) -> None:
    async with replicas(tmp_path, authority, b=trustme.CA().issue_cert(HOSTS["b"])) as (a, b):
        for one, other in ((a, b), (b, a)):
            await wait_until(partial(_is_unreachable, one, other.name))


async def test_renewed_certificate_is_used_at_the_next_attempt(tmp_path: Path, authority: trustme.CA) -> None:
    async with replicas(tmp_path, authority, b=authority.issue_cert("127.0.0.3")) as (a, b):
        await wait_until(lambda: "denied access" in b.peer_sync.unreachable().get("a", ""))
        write_certificate(tmp_path, "b", authority.issue_cert(HOSTS["b"]), authority)
        await b.wait_connected_to(a)
        await a.wait_connected_to(b)  # the port of `b` presents the new certificate, too
        os.unlink(tmp_path / "b-key.pem")
        await a.stop()
        await wait_until(lambda: "b-key.pem cannot be read" in b.peer_sync.unreachable().get("a", ""))
