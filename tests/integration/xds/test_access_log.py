"""The JSON line that a real Envoy writes for each session: its fields, and null for unknown values."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from controlplane.xds.resources.access_log import build_access_log
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap
from tests.support.module.envoy import ModuleEnvoy, connect_logged_in, serve_envoy, serve_ok
from tests.support.waiting import wait_until

COMMON = {"start_time", "duration_ms", "connection_id", "client", "response_flags", "first_node"}
BYTES = {"bytes_from_client", "bytes_to_client"}


async def test_writes_one_line_per_session(tmp_path: Path, ports: Ports, envoy_process: StartEnvoy) -> None:
    log = tmp_path / "sessions.log"
    settings = {"sql": {"access_log": str(log)}}
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, settings=settings) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        port = session.writer.get_extra_info("sockname")[1]
        assert await session.is_alive()
        session.close()
        async with asyncio.timeout(10):
            await a.connection_ends.get()
        await test_bed.envoy.stop()  # flushes the access log
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line.keys() == COMMON | BYTES
    assert (line["client"], line["first_node"]) == (f"127.0.0.1:{port}", a.endpoint)
    assert (line["bytes_from_client"], line["bytes_to_client"]) == (len("ping\n"), len("a\nping\n"))
    assert isinstance(line["duration_ms"], int)
    assert isinstance(line["connection_id"], int)
    assert line["response_flags"] == "-"
    assert datetime.fromisoformat(line["start_time"]).tzinfo is not None


async def test_writes_line_for_session_without_node(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    log = tmp_path / "sessions.log"
    settings = {"sql": {"access_log": str(log)}}
    async with run_xds_test_bed(ports, envoy_process, settings=settings) as test_bed:
        await test_bed.publish(make_plan())
        assert (await test_bed.wait_for_session()).node == ""
        await test_bed.envoy.stop()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["first_node"], line["response_flags"]) == (None, "UH")


async def test_values_missing_from_module_are_null(tmp_path: Path) -> None:
    log = tmp_path / "sessions.log"
    access_log = build_access_log(log, "nobody")
    async with run_fake_server(serve_ok) as node:
        test_bed = ModuleConfig()
        config = bootstrap([Host(node.endpoint, "n")], test_bed)
        proxy: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][-1]
        proxy["typed_config"]["access_log"] = [json_format.MessageToDict(access_log)]
        envoy = ModuleEnvoy(json.dumps(config), tmp_path)
        async with serve_envoy(envoy, test_bed):
            (await connect_logged_in(envoy)).writer.close()
            async with asyncio.timeout(10):
                await node.connection_ends.get()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["first_node"] == node.endpoint
    assert {key: line[key] for key in line.keys() - COMMON} == dict.fromkeys(BYTES | {"node", "moves"})


async def test_unwritable_log_file_is_rejected_with_its_name(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    missing = tmp_path / "missing" / "sessions.log"
    async with run_xds_test_bed(
        ports, envoy_process, settings={"sql": {"access_log": str(missing)}}
    ) as test_bed:
        test_bed.server.publish(make_plan())
        await wait_until(lambda: "envoy.nack" in test_bed.event_kinds())
        assert test_bed.status.last_nack is not None
        assert str(missing) in test_bed.status.last_nack.message
        assert not test_bed.is_acked()
