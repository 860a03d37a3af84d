"""Settings applied in a running Envoy: sockets, limits, PROXY headers, bootstraps."""

from __future__ import annotations

import asyncio
import re
import struct
import subprocess
from pathlib import Path

import pytest
import trustme

from controlplane.config.settings import Settings
from controlplane.errors import ConfigError
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap
from sandbox.envoy import envoy_binary
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    echo_handler,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.fake_servers import run_fake_server

PROXY_HEADER = b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n"


def socket_line(local: int, remote: int) -> str:
    """Return the line of `ss` about the established socket between two ports, with its timers."""
    listing = subprocess.run(
        ["ss", "-tnoH", "state", "established", f"( sport = :{local} and dport = :{remote} )"],
        capture_output=True,
        text=True,
        check=True,
    )
    return listing.stdout


async def test_keepalive_is_enabled_on_both_sides(ports: Ports, envoy_process: StartEnvoy) -> None:
    settings = {"sql": {"keepalive_idle": 47}, "backend": {"keepalive_idle": 23}}
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, settings=settings) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        client = session.writer.get_extra_info("sockname")[1]
        (upstream,) = [writer.get_extra_info("peername")[1] for writer in a.writers]
        for line, idle_seconds in (
            (socket_line(test_bed.sql_port, client), 47),
            (socket_line(upstream, int(a.endpoint.rpartition(":")[2])), 23),
        ):
            timer = re.search(r"timer:\(keepalive,(\d+)sec", line)
            assert timer is not None, line
            assert idle_seconds - 10 < int(timer[1]) <= idle_seconds


async def test_closes_connections_over_listener_limit(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, settings={"sql": {"max_connections": 2}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await test_bed.wait_for_session()
        nodes = [(await test_bed.connect()).node for _ in range(3)]
        assert nodes == ["a", "", ""]
        assert await test_bed.sessions[0].is_alive()


async def test_closes_connections_over_cluster_limit(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, settings={"backend": {"max_connections": 2}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await test_bed.wait_for_session()
        assert [(await test_bed.connect()).node for _ in range(3)] == ["a", "", ""]


async def test_cluster_is_unlimited_by_default(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await test_bed.wait_for_session()).node == "a"
        limits = (await test_bed.envoy.get("/clusters")).text
        for kind in ("connections", "pending_requests", "requests", "retries"):
            assert f"tidb::default_priority::max_{kind}::{2**32 - 1}\n" in limits


async def test_closes_connections_over_envoy_limit(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, settings={"overload": {"max_connections": 2}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await test_bed.wait_for_session()
        assert [(await test_bed.connect()).node for _ in range(2)] == ["a", ""]
        assert await test_bed.sessions[0].is_alive()
        overflows = await test_bed.envoy.stats(
            "downstream_global_cx_overflow"
        )  # the admin port still answers
        assert overflows["listener.sql.downstream_global_cx_overflow"] == 1
        test_bed.sessions[1].close()
        async with asyncio.timeout(10):
            while (await test_bed.connect()).node != "a":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)


async def test_heap_pressure_is_relative_to_limit(ports: Ports, envoy_process: StartEnvoy) -> None:
    limit = 64 << 20
    async with run_xds_test_bed(
        ports, envoy_process, settings={"overload": {"max_heap_bytes": limit}}
    ) as test_bed:
        name = "overload.envoy.resource_monitors.fixed_heap.pressure"
        async with asyncio.timeout(10):
            while not (pressure := (await test_bed.envoy.stats(name))[name]):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        memory = (await test_bed.envoy.get("/memory")).json()
        percents = [100 * int(memory[key]) / limit for key in ("allocated", "total_physical_bytes")]
        assert percents[0] - 5 < pressure < percents[1] + 5, memory


async def test_sends_proxy_protocol_v1_to_nodes(ports: Ports, envoy_process: StartEnvoy) -> None:
    received: list[bytes] = []
    async with (
        run_fake_server(echo_handler("a", received)) as a,
        run_xds_test_bed(ports, envoy_process, settings={"backend": {"proxy_protocol": "v1"}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        client = session.writer.get_extra_info("sockname")[1]
        assert received == [f"PROXY TCP4 127.0.0.1 127.0.0.1 {client} {test_bed.sql_port}\r\n".encode()]


async def test_sends_proxy_protocol_v2_to_nodes(ports: Ports, envoy_process: StartEnvoy) -> None:
    received: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(16 + 12))
        await echo_handler("a")(reader, writer)

    async with (
        run_fake_server(handler) as a,
        run_xds_test_bed(ports, envoy_process, settings={"backend": {"proxy_protocol": "v2"}}) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        client = session.writer.get_extra_info("sockname")[1]
        # Version 2, command PROXY, TCP/IPv4, 12 bytes of addresses (haproxy doc/proxy-protocol.txt, 2.2).
        fixed = b"\r\n\r\n\0\r\nQUIT\n" + bytes((0x21, 0x11)) + struct.pack(">H", 12)
        addresses = bytes((127, 0, 0, 1)) * 2 + struct.pack(">HH", client, test_bed.sql_port)
        assert received == [fixed + addresses]
        assert await session.is_alive()  # no byte of the header is forwarded as data


@pytest.mark.parametrize(
    ("trusted", "first", "node"),
    [
        ("127.0.0.0/8", PROXY_HEADER, "a"),
        ("127.0.0.0/8", b"no header, and a line that is long enough\r\n", ""),
        ("10.0.0.0/8", PROXY_HEADER, ""),
        # A trusted address in the header does not make the proxy trusted.
        ("192.0.2.0/24", PROXY_HEADER, ""),
    ],
)
async def test_required_proxy_protocol_admits_only_trusted_proxies(
    ports: Ports, envoy_process: StartEnvoy, trusted: str, first: bytes, node: str
) -> None:
    received: list[bytes] = []
    async with (
        run_fake_server(echo_handler("a", received)) as a,
        run_xds_test_bed(
            ports,
            envoy_process,
            settings={
                "sql": {"proxy_protocol": "required", "trusted_proxies": [trusted]},
                "backend": {"proxy_protocol": "v1"},
            },
        ) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await test_bed.wait_for_session(first)).node == node
        if node:
            assert received == [first]  # the client's address is forwarded
        elif first == PROXY_HEADER:
            stats = await test_bed.envoy.stats("listener.sql.no_filter_chain_match")
            assert list(stats.values()) == [1]


@pytest.mark.parametrize(
    ("control_planes", "delta", "tls"),
    [
        (["127.0.0.1:18000"], False, None),
        (["[::1]:18000", "10.0.0.1:18000"], True, None),
        (["plane-0.test:18000", "10.0.0.1:18000"], False, ControlPlaneTls("/ca.pem", "plane.test")),
        (["plane-0.test:18000", "10.0.0.1:18000"], False, ControlPlaneTls("/ca.pem")),
    ],
)
async def test_envoy_accepts_every_form_of_bootstrap(
    tmp_path: Path, control_planes: list[str], delta: bool, tls: ControlPlaneTls | None
) -> None:
    if tls is not None:
        authority = tmp_path / "ca.pem"
        trustme.CA().cert_pem.write_to_path(str(authority))
        tls = ControlPlaneTls(str(authority), tls.server_name)
    text = render_bootstrap(
        Settings(), control_planes=control_planes, node_id='an "id": {x}', tls=tls, delta=delta
    )
    (tmp_path / "envoy.yaml").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(str(envoy_binary()), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert b"[warning]" not in output, output.decode()


async def test_used_port_raises_config_error(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_xds_test_bed(ports, envoy_process) as test_bed:
        second = test_bed.new_server()
        with pytest.raises(ConfigError, match=r"xds\.listen"):
            await second.start()
        await second.stop()
