"""What settings become in a running Envoy: sockets, limits, PROXY headers, TLS to the control plane."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
import trustme

from controlplane.config import Settings
from controlplane.errors import ConfigError
from controlplane.publish.bootstrap import ControlPlaneTls, render
from sandbox.envoy import envoy_binary
from sandbox.ports import Ports
from tests.peers import listening
from tests.xds_rig import StartEnvoy, echo, echoes, plan, planned, rig


def socket_line(local: int, remote: int) -> str:
    """What `ss` tells of the established socket between two ports, with its timers."""
    listing = subprocess.run(
        ["ss", "-tnoH", "state", "established", f"( sport = :{local} and dport = :{remote} )"],
        capture_output=True,
        text=True,
        check=True,
    )
    return listing.stdout


async def test_keepalive_runs_on_both_sides(ports: Ports, envoy_process: StartEnvoy) -> None:
    settings = {"sql": {"keepalive_idle": 47}, "backend": {"keepalive_idle": 23}}
    async with echoes("a") as (a,), rig(ports, envoy_process, settings=settings) as parts:
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        session = await parts.first_session()
        client = session.writer.get_extra_info("sockname")[1]
        (upstream,) = [writer.get_extra_info("peername")[1] for writer in a.writers]
        for line, most in (
            (socket_line(parts.sql_port, client), 47),
            (socket_line(upstream, int(a.endpoint.rpartition(":")[2])), 23),
        ):
            timer = re.search(r"timer:\(keepalive,(\d+)sec", line)
            assert timer is not None, line
            assert most - 10 < int(timer[1]) <= most


async def test_connections_over_the_listeners_limit_are_closed(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        echoes("a") as (a,),
        rig(ports, envoy_process, settings={"sql": {"max_connections": 2}}) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        await parts.first_session()
        nodes = [(await parts.connect()).node for _ in range(3)]
        assert nodes == ["a", "", ""]
        assert await parts.sessions[0].lives()


async def test_connections_over_the_clusters_limit_are_closed(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        echoes("a") as (a,),
        rig(ports, envoy_process, settings={"backend": {"max_connections": 2}}) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        await parts.first_session()
        assert [(await parts.connect()).node for _ in range(3)] == ["a", "", ""]


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_proxy_protocol_to_nodes_tells_the_client(
    ports: Ports, envoy_process: StartEnvoy, version: str
) -> None:
    heard: list[bytes] = []
    async with (
        listening(echo("a", heard)) as a,
        rig(ports, envoy_process, settings={"backend": {"proxy_protocol": version}}) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        session = await parts.first_session() if version == "v1" else None
        if session is not None:
            client = session.writer.get_extra_info("sockname")[1]
            assert heard == [f"PROXY TCP4 127.0.0.1 127.0.0.1 {client} {parts.sql_port}\r\n".encode()]
            return
        # The binary header begins with CR LF CR LF NUL CR LF, so that a line reader sees its first line.
        await parts.first_session()
        assert heard == [b"\r\n"]


@pytest.mark.parametrize(
    ("setting", "first", "node"),
    [
        ("optional", b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n", "a"),
        ("optional", b"x\n", "a"),
        ("required", b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n", "a"),
        ("required", b"no header, and a line that is long enough\r\n", ""),
    ],
)
async def test_proxy_protocol_from_clients(
    ports: Ports, envoy_process: StartEnvoy, setting: str, first: bytes, node: str
) -> None:
    heard: list[bytes] = []
    async with (
        listening(echo("a", heard)) as a,
        rig(
            ports,
            envoy_process,
            settings={"sql": {"proxy_protocol": setting}, "backend": {"proxy_protocol": "v1"}},
        ) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        assert (await parts.first_session(first)).node == node
        if first.startswith(b"PROXY"):
            assert heard == [first]  # the client's address is passed on


async def test_mutual_tls_to_the_control_plane(
    ports: Ports, envoy_process: StartEnvoy, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("envoy-1.test")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key", "my_cert", "my_key")}
    authority.cert_pem.write_to_path(files["ca"])
    server.cert_chain_pems[0].write_to_path(files["cert"])
    server.private_key_pem.write_to_path(files["key"])
    client.cert_chain_pems[0].write_to_path(files["my_cert"])
    client.private_key_pem.write_to_path(files["my_key"])
    ours = {"cert": files["cert"], "key": files["key"], "client_ca": files["ca"]}
    theirs = ControlPlaneTls(files["ca"], "127.0.0.1", files["my_cert"], files["my_key"])
    async with (
        echoes("a") as (a,),
        rig(ports, envoy_process, tls=theirs, settings={"xds": {"tls": ours}}) as parts,
    ):
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        assert (await parts.first_session()).node == "a"


@pytest.mark.parametrize(
    ("planes", "delta", "tls"),
    [
        (["127.0.0.1:18000"], False, None),
        (["[::1]:18000", "10.0.0.1:18000"], True, None),
        (["plane-0.test:18000", "10.0.0.1:18000"], False, ControlPlaneTls("/ca.pem", "plane.test")),
    ],
)
async def test_every_form_of_the_bootstrap_is_one_to_envoy(
    tmp_path: Path, planes: list[str], delta: bool, tls: ControlPlaneTls | None
) -> None:
    if tls is not None:
        authority = tmp_path / "ca.pem"
        trustme.CA().cert_pem.write_to_path(str(authority))
        tls = ControlPlaneTls(str(authority), tls.server_name)
    text = render(Settings(), control_planes=planes, node_id='an "id": {x}', tls=tls, delta=delta)
    (tmp_path / "envoy.yaml").write_text(text)
    checked = await asyncio.create_subprocess_exec(
        *(str(envoy_binary()), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await checked.communicate()
    assert checked.returncode == 0, output.decode()
    assert b"[warning]" not in output, output.decode()


async def test_a_taken_port_is_an_error_with_its_name(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with rig(ports, envoy_process) as parts:
        second = parts.new_server()
        with pytest.raises(ConfigError, match=r"xds\.listen"):
            await second.start()
        await second.stop()
