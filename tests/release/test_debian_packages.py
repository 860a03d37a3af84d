"""The Debian packages on a clean Debian with systemd, by the commands of docs/install/debian.md.

The files and services of several machines are on one.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from sandbox.tidb_sim.server import TidbSim
from tests.support.release.install_page import page_blocks
from tests.support.release.machine import Machine
from tests.support.release.serving import single
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

_PAGE = "debian.md"


async def install(machine: Machine, release: Path) -> None:
    """Install both packages with the first commands of the page."""
    packages = [single(release, pattern) for pattern in ("tidevoy_*.deb", "tidevoy-envoy_*.deb")]
    for package in packages:
        machine.add_file(package)
    commands, *_ = page_blocks(_PAGE, "One machine")
    names = (f"./{package.name}" for package in packages)
    started_at = time.monotonic()
    await machine.run_page([re.sub(r"\./\S+\.deb", lambda _: next(names), commands)])
    print(f"\nDebian packages: installed in {time.monotonic() - started_at:.0f} s")
    replace = machine.path("/usr/sbin/tidevoy-replace-envoy")
    replace.write_text(machine.with_ports(replace.read_text()))


async def test_one_machine_serves_sql_stops_and_is_purged(
    release: Path, machine: Machine, node: TidbSim
) -> None:
    await install(machine, release)
    unit = "tidevoy-with-envoy"
    _, configure, start = page_blocks(_PAGE, "One machine")
    await machine.run_page([configure])
    machine.write_settings(machine.settings(node))
    started_at = time.monotonic()
    assert node.sql_address in await machine.run_page([start])
    await machine.wait_until_serving(unit)
    print(f"\nDebian packages: serve SQL {time.monotonic() - started_at:.1f} s after their start")
    await machine.run("systemctl", "restart", unit)
    await machine.wait_until_serving(unit)
    await machine.run("systemctl", "stop", unit)
    assert await machine.show_unit(unit, "ActiveState", "Result") == ["inactive", "success"]
    await machine.run("apt-get", "purge", "-qq", "tidevoy", "tidevoy-envoy")
    left = machine.path("/etc").rglob("*tidevoy*")
    assert {file.name for file in left} == {"tidevoy-with-envoy.service.d"}  # of the test
    for path in ("/var/lib/tidevoy", "/var/log/tidevoy", "/usr/lib/tidevoy"):
        assert not machine.path(path).exists(), path


async def test_an_envoy_of_several_machines_is_replaced(
    release: Path, machine: Machine, node: TidbSim
) -> None:
    await install(machine, release)
    names = {"cert": "control-plane.pem", "key": "control-plane.key", "client_ca": "ca.pem"}
    settings = machine.settings(node)
    settings["xds"]["tls"] = {setting: f"/etc/tidevoy/{file}" for setting, file in names.items()}
    machine.write_settings(settings)
    *control_plane, start_envoy, show_envoys = page_blocks(_PAGE, "Several machines")
    # On the Envoy's machine, the files are in one directory.
    await machine.run_page([*control_plane, "cp certificates/* .", start_envoy])
    await machine.wait_until_serving("tidevoy", "tidevoy-envoy@a")

    async def shows_envoy() -> bool:
        output = await machine.run_page([show_envoys])
        return re.search(r"^envoy-1a .* module ", output, re.M) is not None

    await wait_until(shows_envoy)
    await machine.run("tidevoy-replace-envoy")
    assert await machine.show_unit("tidevoy-envoy@a", "ActiveState", "Result") == ["inactive", "success"]
    await machine.wait_until_serving("tidevoy-envoy@b")
    # The installation of a package restarts the control plane, and no Envoy.
    units = ("tidevoy", "tidevoy-envoy@b")
    before = [await machine.show_unit(unit, "ActiveState", "MainPID") for unit in units]
    await machine.run_page(["apt-get install -qq --reinstall ./*.deb"])
    after = [await machine.show_unit(unit, "ActiveState", "MainPID") for unit in units]
    assert [state for state, _ in after] == ["active", "active"]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
    await machine.wait_until_serving(*units)
