"""TLS between Envoys and the control plane: who is let in, and who is not."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import trustme
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

from controlplane.clock import steady_clock
from controlplane.config import Settings
from controlplane.publish.bootstrap import ControlPlaneTls
from controlplane.publish.resource_type import CLUSTER
from controlplane.publish.server import XdsServer
from sandbox.ports import Ports
from tests.xds_rig import StartEnvoy, echoes, plan, planned, rig


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ours(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """`xds.tls` of a control plane that asks for client certificates of `authority`."""
    files = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "client_ca")}
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["client_ca"])
    return files


def known_by(authority: trustme.CA, issuer: trustme.CA | None) -> grpc.ChannelCredentials:
    """A client that trusts `authority` and presents a certificate of `issuer`, or none."""
    mine = issuer.issue_cert("envoy-1.test") if issuer is not None else None
    return grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        mine.private_key_pem.bytes() if mine is not None else None,
        mine.cert_chain_pems[0].bytes() if mine is not None else None,
    )


async def first_response(
    target: str, credentials: grpc.ChannelCredentials
) -> discovery_pb2.DiscoveryResponse:
    """What a client is sent that asks for clusters."""
    async with grpc.aio.secure_channel(target, credentials) as channel:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(timeout=10)
        request = discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url)
        request.node.id = "envoy-1"
        await call.write(request)
        return await call.read()


async def test_mutual_tls_to_the_control_plane(
    ports: Ports, envoy_process: StartEnvoy, tmp_path: Path, authority: trustme.CA, ours: dict[str, str]
) -> None:
    client = authority.issue_cert("envoy-1.test")
    mine = {name: str(tmp_path / f"my_{name}.pem") for name in ("cert", "key")}
    client.cert_chain_pems[0].write_to_path(mine["cert"])
    client.private_key_pem.write_to_path(mine["key"])
    theirs = ControlPlaneTls(ours["client_ca"], "127.0.0.1", mine["cert"], mine["key"])
    async with (
        echoes("a") as (a,),
        rig(ports, envoy_process, tls=theirs, settings={"xds": {"tls": ours}}) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        assert (await parts.first_session()).node == "a"


async def test_only_a_certificate_of_the_client_ca_opens_the_door(
    authority: trustme.CA, ours: dict[str, str]
) -> None:
    events: list[tuple[str, ...]] = []
    settings = Settings.model_validate({"xds": {"listen": "127.0.0.1:0", "tls": ours}})
    server = XdsServer(settings, steady_clock(), on_event=lambda *event: events.append(event))
    await server.start()
    try:
        server.publish(plan())
        target = f"127.0.0.1:{server.port}"
        for issuer in (None, trustme.CA()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await first_response(target, known_by(authority, issuer))
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (events, server.statuses()) == ([], [])
        response = await first_response(target, known_by(authority, authority))
        assert response.type_url == CLUSTER.url
    finally:
        await server.stop()
