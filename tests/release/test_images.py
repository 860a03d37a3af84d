"""The images of a release, loaded from their archive, serve SQL without privileges."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from release.__main__ import ROOT
from release.images import IMAGES, build_images
from release.version import read_version
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from tests.support.cache import cache_directory
from tests.support.compose.commands import run_command
from tests.support.compose.docker_daemon import docker_daemon
from tests.support.compose.images import build_base_images, package_index
from tests.support.release.install_page import page_blocks, replace_ports
from tests.support.release.serving import settings_for, wait_until_serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)


async def test_images_serve_sql(
    tmp_path: Path, node: TidbSim, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are those of docs/install/containers.md."""
    version = read_version(ROOT)
    used = {name: ports.allocate() for name in ("sql", "api", "xds", "admin_a", "admin_b")}
    cache = cache_directory("compose")
    async with docker_daemon(cache) as docker:
        for name, value in {**docker.environment, **await package_index()}.items():
            monkeypatch.setenv(name, value)
        await build_base_images(docker, cache)
        await asyncio.to_thread(build_images, ROOT, version, tmp_path, ["--network=host"])
        await docker("rmi", "--force", *(f"{name}:{version}" for name in IMAGES))
        settings = settings_for(node, used["sql"], used["api"], used["xds"])
        commands = PageCommands(tmp_path, used, yaml.safe_dump(settings))
        (start, show_nodes), (replace,), (issue_certificates,) = (
            page_blocks("containers.md", heading)
            for heading in ("Run", "Replace an Envoy", "Several machines")
        )
        started_at = time.monotonic()
        await commands.run(start)
        await wait_until_serving(used["sql"])
        print(f"\nimages: loaded, and serve SQL after {time.monotonic() - started_at:.0f} s")
        assert node.sql_address in await commands.run(show_nodes)
        await commands.run(replace)
        await wait_until_serving(used["sql"])

        async def is_healthy() -> bool:
            status = await docker("inspect", "--format={{.State.Health.Status}}", "envoy-b")
            return status.strip() == "healthy"

        await wait_until(is_healthy)
        stopped_at = time.monotonic()
        await docker("stop", "envoy-b", timeout=60.0)
        state = await docker("inspect", "--format={{.State.ExitCode}}", "envoy-b")
        assert (state.strip(), time.monotonic() - stopped_at < 40.0) == ("0", True)
        await commands.run(issue_certificates)
        assert (tmp_path / "tidevoy/control-plane.key").stat().st_uid == 10001


class PageCommands:
    """Runs commands of the page with other ports, and with these settings."""

    def __init__(self, directory: Path, ports: Mapping[str, int], settings: str) -> None:
        self._directory, self._ports, self._settings = directory, ports, settings

    async def run(self, commands: str) -> str:
        text = re.sub(r"^pd:\n.*?(?=^END)", self._settings, commands, flags=re.M | re.S)
        text = text.replace("18000 > envoy-a.yaml", "18000 --admin 127.0.0.1:9901 > envoy-a.yaml")
        text = replace_ports(text, self._ports)
        url = f"--env TIDEVOY_URL=http://127.0.0.1:{self._ports['api']}"
        text = text.replace("docker exec", f"docker exec {url}")
        return await run_command("bash", "-ec", text, timeout=180.0, directory=self._directory)
