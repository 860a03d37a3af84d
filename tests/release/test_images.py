"""The images of a release, loaded from their archive, serve SQL without privileges."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import yaml

from release.__main__ import ROOT
from release.images import IMAGES, build_images
from release.version import read_version
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from tests.support.cache import cache_directory
from tests.support.compose.docker_daemon import docker_daemon
from tests.support.compose.images import build_base_images, package_index
from tests.support.release.serving import settings_for, wait_until_serving

pytestmark = pytest.mark.timeout(1800)


async def test_images_serve_sql(
    tmp_path: Path, node: TidbSim, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = read_version(ROOT)
    sql, api, xds, admin = (ports.allocate() for _ in range(4))
    cache = cache_directory("compose")
    async with docker_daemon(cache) as docker:
        for name, value in {**docker.environment, **await package_index()}.items():
            monkeypatch.setenv(name, value)
        await build_base_images(docker, cache)
        archive = await asyncio.to_thread(build_images, ROOT, version, tmp_path, ["--network=host"])
        names = [f"{name}:{version}" for name in IMAGES]
        await docker("rmi", "--force", *names)
        await docker("load", "--input", str(archive), timeout=120.0)
        started_at = time.monotonic()
        settings = tmp_path / "tidevoy.yaml"
        settings.write_text(yaml.safe_dump(settings_for(node, sql, api, xds)))
        bootstrap = tmp_path / "bootstrap.yaml"
        run = ("run", "--detach", "--network=host", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
        control_plane, envoy = names
        volume = f"--volume={settings}:/etc/tidevoy/tidevoy.yaml:ro"
        await docker(*run, volume, "--volume=state:/var/lib/tidevoy", control_plane)
        module = "/usr/lib/tidevoy/libtidevoy.so"
        print_bootstrap = (
            *("bootstrap", "--config=/etc/tidevoy/tidevoy.yaml", f"--module={module}"),
            *(f"--control-plane=127.0.0.1:{xds}", f"--admin=127.0.0.1:{admin}"),
        )
        output = await docker("run", "--rm", "--network=none", volume, control_plane, *print_bootstrap)
        bootstrap.write_text(output)
        container = await docker(*run, f"--volume={bootstrap}:/etc/tidevoy/bootstrap.yaml:ro", envoy)
        await wait_until_serving(sql)
        print(f"\nimages: serve SQL after {time.monotonic() - started_at:.0f} s")
        stopped_at = time.monotonic()
        await docker("stop", "--time=45", container.strip(), timeout=60.0)
        state = await docker("inspect", "--format={{.State.ExitCode}}", container.strip())
        assert (state.strip(), time.monotonic() - stopped_at < 40.0) == ("0", True)
