"""`tidevoy run` as a person uses it: start, connect, look, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pymysql
import pytest

from sandbox.child_process import ChildProcess
from sandbox.ports import Ports

TIDEVOY = str(Path(sys.executable).with_name("tidevoy"))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A started `tidevoy run`."""

    process: ChildProcess
    sql: int
    api: int
    parts: tuple[psutil.Process, ...]

    def part(self, words: str) -> psutil.Process:
        """The child process with these words in its command line."""
        (found,) = [part for part in self.parts if words in " ".join(part.cmdline())]
        return found


Start = Callable[..., Awaitable[Cluster]]


@pytest.fixture
def options() -> list[str]:
    """Options for free ports. They are given back before the program claims them: it is another process."""
    with Ports() as ports:
        sql, api, xds, admin = (ports.allocate() for _ in range(4))
    return [f"--port={sql}", f"--api-port={api}", f"--xds-port={xds}", f"--admin-port={admin}", "--stand-ins"]


@pytest.fixture
async def start(tmp_path: Path, options: list[str]) -> AsyncIterator[Start]:
    """Starts `tidevoy run` and returns when it says that it is ready."""
    started: list[ChildProcess] = []

    async def start_one(*more: str) -> Cluster:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        process = ChildProcess.start(
            "run", [TIDEVOY, "run", *options, *more], directory=tmp_path, env=environment
        )
        started.append(process)
        async with asyncio.timeout(90):
            while "Ctrl-C ends it." not in process.output():
                assert process.returncode is None, process.output()
                await asyncio.sleep(0.05)
        sql, api = (int(option.partition("=")[2]) for option in options[:2])
        return Cluster(process, sql, api, tuple(psutil.Process(process.pid).children(recursive=True)))

    yield start_one
    for process in started:
        await process.kill()


async def _until_gone(parts: tuple[psutil.Process, ...]) -> None:
    """What is killed with its parent goes a moment after it."""
    _, left = await asyncio.to_thread(psutil.wait_procs, parts, timeout=10)
    assert left == []


def _temporary(directory: Path) -> list[Path]:
    return list(directory.glob("tidevoy-*"))


async def test_clients_connect_and_operators_look(start: Start) -> None:
    cluster = await start("--nodes", "2")

    def query() -> object:
        connection = pymysql.connect(host="127.0.0.1", port=cluster.sql, user="root")
        with connection, connection.cursor() as cursor:
            cursor.execute("select 1")
            return cursor.fetchone()

    assert await asyncio.to_thread(query) == (1,)
    for client in ("mysql", "mariadb"):
        told = await _output(client, "-h127.0.0.1", f"-P{cluster.sql}", "-uroot", "-N", "-e", "select 1")
        assert told == "1\n"
    nodes = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "nodes")
    assert nodes.count("active") == 2
    # What it prints can be typed as it stands.
    assert f"tidevoy --url http://127.0.0.1:{cluster.api} nodes" in cluster.process.output()


async def test_a_file_adds_settings_to_the_clusters_own(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("balance: {slow_start: 7}\nsql:\n  max_connections: 321\n")
    cluster = await start("--nodes", "1", "--config", str(file))
    told = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "config", "show", "--json")
    settings = json.loads(told)
    assert (settings["balance"]["slow_start"], settings["sql"]["max_connections"]) == (7, 321)
    assert settings["sql"]["listen"] == f"127.0.0.1:{cluster.sql}"


def test_a_file_that_cannot_be_used_is_told_before_anything_starts(
    tmp_path: Path, options: list[str]
) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("sql:\n  max_connections: -1\n")
    told = subprocess.run(
        [TIDEVOY, "run", *options, "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(f"tidevoy: {file}:2: sql.max_connections: -1 is too small")


async def _addresses(cluster: Cluster) -> list[str]:
    told = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "nodes", "--json")
    return [node["address"] for node in json.loads(told)["nodes"]]


async def _output(*command: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
async def test_signal_ends_everything(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    cluster = await start("--nodes", "2")
    assert len(cluster.parts) == 6  # etcd, MariaDB, two nodes, control plane, Envoy
    assert _temporary(tmp_path)
    cluster.process.send_signal(number)
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 0
    await _until_gone(cluster.parts)
    assert not _temporary(tmp_path)
    assert cluster.process.tail(1) == "Ending ..."


async def test_impatient_second_signal_changes_nothing(start: Start, tmp_path: Path) -> None:
    cluster = await start("--nodes", "1")
    cluster.process.send_signal(signal.SIGINT)
    cluster.process.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 0
    await _until_gone(cluster.parts)
    assert not _temporary(tmp_path)


async def test_signal_during_start_ends_everything(tmp_path: Path, options: list[str]) -> None:
    process = ChildProcess.start("run", [TIDEVOY, "run", *options], directory=tmp_path)
    try:
        async with asyncio.timeout(60):
            while "Starting" not in process.output():
                assert process.returncode is None, process.output()
                await asyncio.sleep(0.02)
        parts = tuple(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await _until_gone(parts)
    finally:
        await process.kill()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--initial-cluster=", "etcd"),
        ("mariadbd ", "mariadb"),
        ("sandbox.tidb_sim", "tidb-1"),
        (" serve ", "control-plane"),
        ("--admin-address-path ", "envoy"),
    ],
)
async def test_part_that_dies_ends_it_and_is_named(
    start: Start, tmp_path: Path, words: str, name: str
) -> None:
    cluster = await start("--nodes", "1")
    cluster.part(words).kill()
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 1
    assert f"tidevoy: {name} was ended by SIGKILL" in cluster.process.output()
    await _until_gone(cluster.parts)
    assert not _temporary(tmp_path)


async def test_nothing_outlives_a_run_that_is_killed(start: Start) -> None:
    cluster = await start("--nodes", "1")
    os.kill(cluster.process.pid, signal.SIGKILL)
    await _until_gone(cluster.parts)


async def test_directory_keeps_data_and_belongs_to_one_run(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = await start("--nodes", "1", "--dir", str(kept), "--graceful-wait", "0")
    before = await _addresses(first)
    await _output("mysql", "-h127.0.0.1", f"-P{first.sql}", "-uroot", "-e", "create database kept")
    second = ChildProcess.start("second", [TIDEVOY, "run", "--dir", str(kept)], directory=tmp_path)
    assert await second.wait() == 1
    assert second.tail() == f"tidevoy: --dir {kept} is in use by another `tidevoy run`; choose another"
    first.process.send_signal(signal.SIGTERM)
    assert await first.process.wait() == 0
    again = await start("--nodes", "1", "--dir", str(kept), "--graceful-wait", "0")
    # The same node at the same address, so that what was asked of it is still meant for it.
    assert await _addresses(again) == before
    shown = await _output(
        "mysql", "-h127.0.0.1", f"-P{again.sql}", "-uroot", "-N", "-e", "show databases like 'kept'"
    )
    assert shown == "kept\n"


@pytest.mark.parametrize("option", ["--port", "--api-port", "--xds-port", "--admin-port"])
def test_taken_port_is_named_with_its_option(options: list[str], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        told = subprocess.run(
            [TIDEVOY, "run", *options, f"{option}={port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert told.returncode == 1
    assert told.stderr.startswith(f"tidevoy: port {port} for ")
    assert told.stderr.endswith(f" is taken; free it, or choose another with {option}\n")
    assert told.stdout == ""


def test_missing_programs_are_named_with_their_packages(tmp_path: Path, options: list[str]) -> None:
    # It looks into the system's own directories beside PATH; both are empty here.
    script = "import sandbox.child_process as process; process._SYSTEM_PATH = ''; from cli.main import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", script, "run", *options],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 1
    assert told.stderr == (
        "tidevoy: etcd and mariadbd and mariadb-install-db are not installed; on Debian and Ubuntu: "
        "apt-get install --no-install-recommends etcd-server mariadb-server\n"
    )
