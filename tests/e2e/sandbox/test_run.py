"""`tidevoy run` as a user runs it: start, connect, inspect, and every way in which it ends."""

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
    children: tuple[psutil.Process, ...]

    def child(self, text: str) -> psutil.Process:
        """Return the child process with this text in its command line."""
        (process,) = [child for child in self.children if text in " ".join(child.cmdline())]
        return process


Start = Callable[..., Awaitable[Cluster]]


@pytest.fixture
def options() -> list[str]:
    """Return options with free ports. The ports are released, because `tidevoy run` claims them."""
    with Ports() as ports:
        sql, api, xds, admin = (ports.allocate() for _ in range(4))
    return [f"--port={sql}", f"--api-port={api}", f"--xds-port={xds}", f"--admin-port={admin}", "--fake-tidb"]


@pytest.fixture
async def start(tmp_path: Path, options: list[str]) -> AsyncIterator[Start]:
    """Yield a function that starts `tidevoy run` and returns when it prints that it is ready."""
    started: list[ChildProcess] = []

    async def start_cluster(*more_options: str) -> Cluster:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        process = ChildProcess(
            "run", [TIDEVOY, "run", *options, *more_options], directory=tmp_path, env=environment
        )
        started.append(process)
        async with asyncio.timeout(90):
            while "Press Ctrl-C to stop." not in process.output():
                assert process.returncode is None, process.output()
                await asyncio.sleep(0.05)
        sql, api = (int(option.partition("=")[2]) for option in options[:2])
        return Cluster(process, sql, api, tuple(psutil.Process(process.pid).children(recursive=True)))

    yield start_cluster
    for process in started:
        await process.kill()


async def _wait_ended(children: tuple[psutil.Process, ...]) -> None:
    """Wait until these processes have ended; children end shortly after their killed parent."""
    _, remaining = await asyncio.to_thread(psutil.wait_procs, children, timeout=10)
    assert remaining == []


def _temporary_directories(directory: Path) -> list[Path]:
    return list(directory.glob("tidevoy-*"))


async def test_clients_connect_and_operators_list_nodes(start: Start) -> None:
    cluster = await start("--nodes", "2")

    def query() -> object:
        connection = pymysql.connect(host="127.0.0.1", port=cluster.sql, user="root")
        with connection, connection.cursor() as cursor:
            cursor.execute("select 1")
            return cursor.fetchone()

    assert await asyncio.to_thread(query) == (1,)
    for client in ("mysql", "mariadb"):
        output = await _output(client, "-h127.0.0.1", f"-P{cluster.sql}", "-uroot", "-N", "-e", "select 1")
        assert output == "1\n"
    nodes = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "nodes")
    assert nodes.count("active") == 2
    # `tidevoy run` prints this command for users.
    assert f"tidevoy --url http://127.0.0.1:{cluster.api} nodes" in cluster.process.output()


async def test_config_file_adds_to_the_sandbox_settings(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("balance: {slow_start: 7}\nsql:\n  max_connections: 321\n")
    cluster = await start("--nodes", "1", "--config", str(file))
    output = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "config", "show", "--json")
    settings = json.loads(output)
    assert (settings["balance"]["slow_start"], settings["sql"]["max_connections"]) == (7, 321)
    assert settings["sql"]["listen"] == f"127.0.0.1:{cluster.sql}"


def test_invalid_config_file_is_reported_before_the_start(tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("sql:\n  max_connections: -1\n")
    output = subprocess.run(
        [TIDEVOY, "run", *options, "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (output.returncode, output.stdout) == (2, "")
    assert output.stderr.startswith(f"tidevoy: {file}:2: sql.max_connections: -1 is not allowed")


async def _addresses(cluster: Cluster) -> list[str]:
    output = await _output(TIDEVOY, "--url", f"http://127.0.0.1:{cluster.api}", "nodes", "--json")
    return [node["address"] for node in json.loads(output)["nodes"]]


async def _output(*command: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    stdout, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return stdout.decode()


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    ids=lambda signal_number: signal_number.name,
)
async def test_signal_ends_everything(start: Start, tmp_path: Path, signal_number: signal.Signals) -> None:
    cluster = await start("--nodes", "1")
    assert len(cluster.children) == 5  # etcd, MariaDB, the node, control plane, Envoy
    assert _temporary_directories(tmp_path)
    cluster.process.send_signal(signal_number)
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 0
    await _wait_ended(cluster.children)
    assert not _temporary_directories(tmp_path)
    assert cluster.process.tail(1) == "Stopping ..."


async def test_second_signal_changes_nothing(start: Start, tmp_path: Path) -> None:
    cluster = await start("--nodes", "1")
    cluster.process.send_signal(signal.SIGINT)
    cluster.process.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 0
    await _wait_ended(cluster.children)
    assert not _temporary_directories(tmp_path)


async def test_signal_during_start_ends_everything(tmp_path: Path, options: list[str]) -> None:
    process = ChildProcess("run", [TIDEVOY, "run", *options], directory=tmp_path)
    try:
        async with asyncio.timeout(60):
            while "Starting" not in process.output():
                assert process.returncode is None, process.output()
                await asyncio.sleep(0.02)
        children = tuple(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await _wait_ended(children)
    finally:
        await process.kill()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("--initial-cluster=", "etcd"),
        ("mariadbd ", "mariadb"),
        ("sandbox.tidb_sim", "tidb-1"),
        (" serve ", "control-plane"),
        ("--admin-address-path ", "envoy"),
    ],
)
async def test_process_that_dies_ends_the_run_and_is_named(
    start: Start, tmp_path: Path, text: str, name: str
) -> None:
    cluster = await start("--nodes", "1")
    cluster.child(text).kill()
    async with asyncio.timeout(30):
        assert await cluster.process.wait() == 1
    assert f"tidevoy: {name} was ended by SIGKILL" in cluster.process.output()
    await _wait_ended(cluster.children)
    assert not _temporary_directories(tmp_path)


async def test_no_process_outlives_a_killed_run(start: Start) -> None:
    cluster = await start("--nodes", "1")
    os.kill(cluster.process.pid, signal.SIGKILL)
    await _wait_ended(cluster.children)


async def test_directory_keeps_data_and_is_locked_by_one_run(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    first = await start("--nodes", "1", "--dir", str(directory), "--graceful-wait", "0")
    before = await _addresses(first)
    await _output("mysql", "-h127.0.0.1", f"-P{first.sql}", "-uroot", "-e", "create database kept")
    second = ChildProcess("second", [TIDEVOY, "run", "--dir", str(directory)], directory=tmp_path)
    assert await second.wait() == 1
    assert second.tail() == f"tidevoy: --dir {directory} is in use by another `tidevoy run`; choose another"
    first.process.send_signal(signal.SIGTERM)
    assert await first.process.wait() == 0
    restarted = await start("--nodes", "1", "--dir", str(directory), "--graceful-wait", "0")
    # The node keeps its address, so that operators' requests still apply to it.
    assert await _addresses(restarted) == before
    databases = await _output(
        "mysql", "-h127.0.0.1", f"-P{restarted.sql}", "-uroot", "-N", "-e", "show databases like 'kept'"
    )
    assert databases == "kept\n"


@pytest.mark.parametrize("option", ["--port", "--api-port", "--xds-port", "--admin-port"])
def test_taken_port_is_named_with_its_option(options: list[str], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        output = subprocess.run(
            [TIDEVOY, "run", *options, f"{option}={port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert output.returncode == 1
    assert output.stderr.startswith(f"tidevoy: port {port} for ")
    assert output.stderr.endswith(f" is taken; free it, or choose another with {option}\n")
    assert output.stdout == ""


def test_missing_programs_are_named_with_their_packages(tmp_path: Path, options: list[str]) -> None:
    # The CLI searches for programs in PATH and in _SYSTEM_PATH. Here it finds none.
    script = (
        "import sandbox.child_process as process; process._SYSTEM_PATH = ''; "
        "from cli.main import main; main()"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, "run", *options],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert output.returncode == 1
    assert output.stderr == (
        "tidevoy: etcd and mariadbd and mariadb-install-db are not installed; on Debian and Ubuntu: "
        "apt-get install --no-install-recommends etcd-server mariadb-server\n"
    )
