"""An Envoy without the module ejects a node after a failed connect, but never the last one."""

from __future__ import annotations

import pytest

from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    echo_handler,
    make_node_plan,
    make_plan,
    run_xds_test_bed,
)
from tests.support.fake_servers import run_fake_server
from tests.support.waiting import wait_until


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_last_node_is_never_ejected(ports: Ports, envoy_process: StartEnvoy, count: int) -> None:
    numbers = [ports.allocate() for _ in range(count)]
    # The ejection time is longer than the test, so an ejected node stays ejected.
    settings = {"backend": {"ejection_time": 60, "max_connect_attempts": 10}}
    async with run_xds_test_bed(ports, envoy_process, settings=settings) as test_bed:
        nodes = [make_node_plan(f"n{number}:4000", f"127.0.0.1:{number}") for number in numbers]
        await test_bed.publish(make_plan(*nodes))
        assert (await test_bed.wait_for_session()).node == ""

        async def ejected() -> list[int]:
            clusters = (await test_bed.envoy.get("/clusters")).text
            failed = "health_flags::/failed_outlier_check"
            return [number for number in numbers if f"tidb::127.0.0.1:{number}::{failed}" in clusters]

        async def all_but_one() -> bool:
            return len(await ejected()) == count - 1

        await wait_until(all_but_one)
        (remaining,) = set(numbers) - set(await ejected())
        async with run_fake_server(echo_handler("remaining"), port=remaining):
            assert (await test_bed.connect()).node == "remaining"
