"""The images of a release, loaded from their archive, serve SQL without privileges."""

from __future__ import annotations

import asyncio
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

pytestmark = pytest.mark.timeout(1800)


async def test_images_serve_sql(
    tmp_path: Path, node: TidbSim, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are those of docs/install/containers.md."""
    version = read_version(ROOT)
    used = {name: ports.allocate() for name in ("sql", "api", "xds", "admin_a")}
    cache = cache_directory("compose")
    async with docker_daemon(cache) as docker:
        for name, value in {**docker.environment, **await package_index()}.items():
            monkeypatch.setenv(name, value)
        await build_base_images(docker, cache)
        await asyncio.to_thread(build_images, ROOT, version, tmp_path, ["--network=host"])
        await docker("rmi", "--force", *(f"{name}:{version}" for name in IMAGES))
        settings = settings_for(node, used["sql"], used["api"], used["xds"])
        (tmp_path / "tidevoy.yaml").write_text(yaml.safe_dump(settings))
        start, show_nodes = commands_of_page(version, used)
        started_at = time.monotonic()
        await run_command("bash", "-ec", start, timeout=180.0, directory=tmp_path)
        await wait_until_serving(used["sql"])
        print(f"\nimages: loaded, and serve SQL after {time.monotonic() - started_at:.0f} s")
        assert node.sql_address in await run_command("bash", "-ec", show_nodes, timeout=60.0)
        stopped_at = time.monotonic()
        await docker("stop", "envoy", timeout=60.0)
        state = await docker("inspect", "--format={{.State.ExitCode}}", "envoy")
        assert (state.strip(), time.monotonic() - stopped_at < 40.0) == ("0", True)


def commands_of_page(version: str, ports: Mapping[str, int]) -> tuple[str, str]:
    """Return the commands that start both containers, and the one that shows nodes, with these ports."""
    (block,) = page_blocks("containers.md")
    admin = f"--admin 127.0.0.1:{ports['admin_a']} --control-plane"
    url = f"docker exec --env TIDEVOY_URL=http://127.0.0.1:{ports['api']}"
    text = block.replace("0.1.0", version).replace("--control-plane", admin)
    text = replace_ports(text.replace("docker exec", url), ports)
    start, show_nodes = text.rstrip().rsplit("\n", 1)
    return start, show_nodes
