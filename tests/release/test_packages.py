"""The files of a release are installed on a clean Debian, and serve SQL there. `make test-dist`.

Files are installed as their pages say (docs/install). systemd does not run: the test starts the command of a
unit as the unit's user.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
import yaml

from release.__main__ import ROOT, build_release
from release.images import IMAGES, build_images
from release.version import read_version
from sandbox.child_process import ChildProcess
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.cache import cache_directory
from tests.support.compose.docker_daemon import docker_daemon
from tests.support.compose.images import build_base_images, package_index
from tests.support.release.clean_root import CleanRoot, clean_root
from tests.support.tidb.sessions import connect, query_value
from tests.support.tidb_sim_clients import session_rules
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the root directory"),
]

_SANDBOX_PACKAGES = ("python3-venv", "etcd-server", "mariadb-server", "openssl", "libgomp1")
_SERVICE_USER = "tidevoy"
_PARTS = frozenset({"debian", "chart", "sbom"})


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a release without images, or use the one in the directory TIDEVOY_DIST."""
    if existing := os.environ.get("TIDEVOY_DIST"):
        return Path(existing)
    directory = tmp_path_factory.mktemp("dist")
    build_release(directory, _PARTS)
    return directory


@pytest.fixture
async def root() -> AsyncIterator[CleanRoot]:
    async with clean_root() as directory:
        yield directory


def single(directory: Path, pattern: str) -> Path:
    (file,) = directory.glob(pattern)
    return file


def settings_for(node: TidbSim, sql: int, api: int, xds: int) -> dict[str, Any]:
    """Return settings of a control plane whose only node is `node`, with these ports on loopback."""
    return {
        "sql": {"listen": f"127.0.0.1:{sql}"},
        "api": {"listen": f"127.0.0.1:{api}"},
        "xds": {"listen": f"127.0.0.1:{xds}"},
        "nodes": [{"address": node.sql_address, "status_address": node.status_address}],
    }


async def wait_until_serving(port: int, process: ChildProcess | None = None) -> None:
    """Wait until a client can query a node through this port. Fails if the process ends before."""

    def query() -> object:
        with connect(port) as connection:
            return query_value(connection, "select 7")

    async def is_serving() -> bool:
        if process is not None:
            assert process.returncode is None, process.tail(40)
        try:
            return await asyncio.to_thread(query) == 7
        except pymysql.MySQLError:
            return False

    try:
        await wait_until(is_serving, 120.0)
    except TimeoutError:
        pytest.fail("no answer to `select 7`" if process is None else process.tail(60))


def test_checksums_match(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=release, check=True)
    listed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in release.iterdir()} - {"SHA256SUMS"}


@pytest.mark.skipif(
    "TIDEVOY_DIST" in os.environ, reason="the release may have been built from another commit"
)
def test_two_builds_are_equal(release: Path, tmp_path: Path) -> None:
    build_release(tmp_path, _PARTS)
    assert (tmp_path / "SHA256SUMS").read_text() == (release / "SHA256SUMS").read_text()


async def test_wheel_starts_a_local_cluster(release: Path, root: CleanRoot, ports: Ports) -> None:
    started_at = time.monotonic()
    port = ports.allocate()
    wheel = root.add_file(single(release, "*.whl"))
    await root.install_packages(*_SANDBOX_PACKAGES)
    await root.run("python3", "-m", "venv", "/opt/tidevoy")
    pip_settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    await root.run(
        "/opt/tidevoy/bin/pip", "install", "--quiet", f"{wheel}[sandbox]", environment=pip_settings
    )
    installed = time.monotonic() - started_at
    options = [f"--{name}={ports.allocate()}" for name in ("api-port", "xds-port", "admin-port")]
    ports.close()  # `tidevoy run` claims its ports itself
    run = ("/opt/tidevoy/bin/tidevoy", "run", "--fake-tidb", f"--port={port}", *options)
    async with root.running("run", *run) as process:
        await wait_until_serving(port, process)
        seconds = time.monotonic() - started_at
    print(f"\nwheel: installed after {installed:.0f} s, serves SQL after {seconds:.0f} s")


async def test_images_serve_sql(
    tmp_path: Path, mariadb: MariaDb, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = read_version(ROOT)
    sql, api, xds, admin = (ports.allocate() for _ in range(4))
    cache = cache_directory("compose")
    async with docker_daemon(cache) as docker, TidbSim(SimSettings(session_rules(mariadb))) as node:
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


async def test_debian_packages_serve_sql(
    release: Path, root: CleanRoot, mariadb: MariaDb, ports: Ports
) -> None:
    started_at = time.monotonic()
    packages = [
        root.add_file(single(release, pattern)) for pattern in ("tidevoy_*.deb", "tidevoy-envoy_*.deb")
    ]
    await root.install_packages(*packages)
    installed = time.monotonic() - started_at
    assert (await root.run("tidevoy", "--version")).strip().endswith(release_version(release))
    sql, api, xds, admin = (ports.allocate() for _ in range(4))
    async with TidbSim(SimSettings(session_rules(mariadb))) as node:
        settings = settings_for(node, sql, api, xds)
        (root.directory / "etc/tidevoy/tidevoy.yaml").write_text(yaml.safe_dump(settings))
        await root.run("tidevoy", "config", "check", "/etc/tidevoy/tidevoy.yaml")
        await root.run("install", "-d", "-o", _SERVICE_USER, "-g", _SERVICE_USER, "/var/lib/tidevoy")
        serve = (
            *("setpriv", f"--reuid={_SERVICE_USER}", f"--regid={_SERVICE_USER}", "--clear-groups"),
            *unit_command(root, "tidevoy-with-envoy.service"),
            f"--envoy-admin=127.0.0.1:{admin}",
        )
        async with root.running("serve", *serve) as process:
            await wait_until_serving(sql, process)
            seconds = time.monotonic() - started_at
    print(f"\nDebian packages: installed after {installed:.0f} s, serve SQL after {seconds:.0f} s")
    await root.run("apt-get", "purge", "-qq", "--yes", "tidevoy", "tidevoy-envoy")
    assert not any(root.has(path) for path in ("/etc/tidevoy", "/var/lib/tidevoy", "/usr/lib/tidevoy"))


def release_version(release: Path) -> str:
    return single(release, "tidevoy_*.deb").name.split("_")[1]


def unit_command(root: CleanRoot, unit: str) -> list[str]:
    """Return the command that systemd would start for a unit."""
    text = (root.directory / "lib/systemd/system" / unit).read_text()
    command = re.search(r"^ExecStart=(.*)", text, re.MULTILINE)
    assert command is not None
    return command[1].split()
