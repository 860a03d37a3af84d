"""The line of JSON that a real Envoy writes for each session: its fields, and what stands for the unknown."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from controlplane.xds.resources.access_log import access_log
from sandbox.ports import Ports
from tests.support.controlplane.xds_server import StartEnvoy, echoes, plan, planned, rig
from tests.support.fake_servers import listening
from tests.support.module.bootstrap import Host, Parts, bootstrap
from tests.support.module.envoy import Envoy, logged_in, serve, serving
from tests.support.waiting import until

COMMON = {"start_time", "duration_ms", "connection_id", "client", "response_flags", "first_node"}
BYTES = {"bytes_from_client", "bytes_to_client"}


async def test_a_session_is_a_line(tmp_path: Path, ports: Ports, envoy_process: StartEnvoy) -> None:
    log = tmp_path / "sessions.log"
    settings = {"sql": {"access_log": str(log)}}
    async with echoes("a") as (a,), rig(ports, envoy_process, settings=settings) as parts:
        await parts.publish(plan(planned("a:4000", a.endpoint)))
        session = await parts.first_session()
        port = session.writer.get_extra_info("sockname")[1]
        assert await session.lives()
        session.close()
        async with asyncio.timeout(10):
            await a.ended.get()
        await parts.envoy.stop()  # Envoy writes what it has kept back
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line.keys() == COMMON | BYTES
    assert (line["client"], line["first_node"]) == (f"127.0.0.1:{port}", a.endpoint)
    assert (line["bytes_from_client"], line["bytes_to_client"]) == (len("ping\n"), len("a\nping\n"))
    assert isinstance(line["duration_ms"], int)
    assert isinstance(line["connection_id"], int)
    assert line["response_flags"] == "-"
    assert datetime.fromisoformat(line["start_time"]).tzinfo is not None


async def test_a_session_that_gets_to_no_node_is_a_line_too(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    log = tmp_path / "sessions.log"
    settings = {"sql": {"access_log": str(log)}}
    async with rig(ports, envoy_process, settings=settings) as parts:
        await parts.publish(plan())
        assert (await parts.first_session()).node == ""
        await parts.envoy.stop()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["first_node"], line["response_flags"]) == (None, "UH")


async def test_what_the_module_does_not_say_is_null(tmp_path: Path) -> None:
    log = tmp_path / "sessions.log"
    asked = access_log(log, "nobody")
    async with listening(serve) as node:
        parts = Parts()
        made = bootstrap([Host(node.endpoint, "n")], parts)
        proxy: dict[str, Any] = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][-1]
        proxy["typed_config"]["access_log"] = [json_format.MessageToDict(asked)]
        envoy = Envoy(json.dumps(made), tmp_path)
        async with serving(envoy, parts):
            (await logged_in(envoy)).writer.close()
            async with asyncio.timeout(10):
                await node.ended.get()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["first_node"] == node.endpoint
    assert {key: line[key] for key in line.keys() - COMMON} == dict.fromkeys(BYTES | {"node", "moves"})


async def test_a_file_that_cannot_be_written_is_refused_with_its_name(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    missing = tmp_path / "missing" / "sessions.log"
    async with rig(ports, envoy_process, settings={"sql": {"access_log": str(missing)}}) as parts:
        parts.server.publish(plan())
        await until(lambda: "envoy.nack" in parts.kinds())
        assert parts.status.last_nack is not None
        assert str(missing) in parts.status.last_nack.message
        assert not parts.is_acked()
