"""The wheel on a clean Debian, by the commands of docs/install/pip.md."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from tests.support.release.install_page import page_blocks, page_lines
from tests.support.release.machine import Machine
from tests.support.release.serving import single

pytestmark = pytest.mark.timeout(1800)

_PAGE = "pip.md"


def with_wheel(command: str, wheel: Path) -> str:
    """Return a command of the page with the name of this wheel."""
    return re.sub(r"tidevoy-\S+?\.whl", wheel.name, command)


async def test_wheel_starts_a_local_cluster(release: Path, machine: Machine, ports: Ports) -> None:
    started_at, unit = time.monotonic(), "tidevoy-run"
    wheel = single(release, "*.whl")
    machine.add_file(wheel)
    *install, run = (with_wheel(line, wheel) for line in page_lines(_PAGE, "To try it"))
    await machine.run_page(install)
    installed = time.monotonic() - started_at
    used = {"port": "sql", "api-port": "api", "xds-port": "xds", "admin-port": "admin_a"}
    options = [f"--{option}={machine.port(name)}" for option, name in used.items()]
    ports.close()  # `tidevoy run` claims its ports itself
    await machine.run("systemd-run", "--quiet", f"--unit={unit}", *run.split(), *options)
    await machine.wait_until_serving(unit)
    print(
        f"\nwheel: installed after {installed:.0f} s, `tidevoy run` serves SQL after"
        f" {time.monotonic() - started_at:.0f} s"
    )
    await machine.run("systemctl", "stop", unit)
    assert await machine.show_unit(unit, "ActiveState", "Result") == ["inactive", "success"]


async def test_units_of_the_wheel_serve_sql(release: Path, machine: Machine, node: TidbSim) -> None:
    started_at = time.monotonic()
    wheel = single(release, "*.whl")
    machine.add_file(wheel)
    install, add_envoy, start = (with_wheel(block, wheel) for block in page_blocks(_PAGE, "In production"))
    await machine.run_page([install, add_envoy])
    machine.write_settings(machine.settings(node))
    assert node.sql_address in await machine.run_page([start])
    await machine.wait_until_serving("tidevoy-with-envoy")
    print(f"\nwheel: units serve SQL after {time.monotonic() - started_at:.0f} s")
    await machine.run_page(page_blocks(_PAGE, "Remove"))
    for path in ("/etc/tidevoy", "/opt/tidevoy", "/usr/bin/tidevoy", "/var/lib/tidevoy"):
        assert not machine.path(path).exists(), path
