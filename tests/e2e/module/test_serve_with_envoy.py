"""`tidevoy serve --with-envoy`: a control plane and an Envoy as one service."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from sandbox.child_process import ChildProcess
from sandbox.control_plane import tidevoy_command
from sandbox.envoy import envoy_binary
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import sends_mysql_greeting
from tests.support.e2e.cluster import open_session, run_cluster
from tests.support.module.bootstrap import require_supervisor
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class SingleHost:
    """The service. Its children: the control plane, and the supervisor of the Envoy."""

    process: ChildProcess
    sql_port: int

    def child(self, text: str) -> psutil.Process | None:
        """Return the child with this text in its command; None if it does not run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.Error):  # it has just ended
                if text in " ".join(child.cmdline()[:6]):
                    return child
        return None

    async def kill_and_wait(self, text: str) -> None:
        """Kill a child, and wait until it is replaced."""
        old = self.child(text)
        assert old is not None
        old.kill()

        def is_replaced() -> bool:
            new = self.child(text)
            return new is not None and new.pid != old.pid

        await wait_until(is_replaced)

    async def wait_for_greeting(self) -> None:
        await wait_until(lambda: sends_mysql_greeting(self.sql_port), 30.0)


@asynccontextmanager
async def run_single_host(
    directory: Path,
    mariadb: MariaDb,
    ports: Ports,
    *,
    certificates: Path | None = None,
    xds_tls: Mapping[str, str] | None = None,
) -> AsyncIterator[SingleHost]:
    """Run the service for the nodes of a cluster, beside the control plane and the Envoy of this cluster."""
    require_supervisor()
    sql, xds, api, admin = (ports.allocate() for _ in range(4))
    single = directory / "single"
    single.mkdir()
    command = [
        *tidevoy_command(),
        *("serve", "--config", str(single / "tidevoy.yaml"), "--with-envoy"),
        *("--envoy", str(envoy_binary()), "--envoy-id", "single", "--envoy-admin", f"127.0.0.1:{admin}"),
        *("--envoy-zone", "zone-b"),
    ]
    if certificates is not None:
        command += ["--envoy-certificates", str(certificates)]
    async with run_cluster(directory, mariadb) as stack:
        config = dict(stack.control_plane.settings) | {
            "sql": {"listen": f"127.0.0.1:{sql}"},
            "xds": {"listen": f"127.0.0.1:{xds}"} | ({} if xds_tls is None else {"tls": dict(xds_tls)}),
            "api": {"listen": f"127.0.0.1:{api}"},
            "state_dir": str(single / "state"),
        }
        (single / "tidevoy.yaml").write_text(yaml.safe_dump(config))
        process = ChildProcess("single-host", command, directory=single)
        try:
            host = SingleHost(process, sql)
            await host.wait_for_greeting()
            yield host
        finally:
            await process.terminate(20.0)


async def test_control_plane_and_envoy_are_restarted_independently(
    tmp_path: Path, mariadb: MariaDb, ports: Ports
) -> None:
    async with (
        run_single_host(tmp_path, mariadb, ports) as host,
        AsyncExitStack() as clients,
    ):
        bootstrap = yaml.safe_load((tmp_path / "single/state/envoy-bootstrap.yaml").read_text())
        assert (bootstrap["node"]["id"], bootstrap["node"]["locality"]["zone"]) == ("single", "zone-b")
        session = await open_session(clients, host.sql_port)
        await host.kill_and_wait("cli.main")
        assert error_code(await session.query("do 1")) == 0  # the Envoy has not noticed
        await host.kill_and_wait("tidevoy-envoy")
        await host.wait_for_greeting()
        await open_session(clients, host.sql_port)
        output = host.process.output()
        assert "the control plane was ended by SIGKILL; it is restarted now" in output
        assert "the Envoy was ended by SIGKILL; it is restarted now" in output


async def test_envoy_drains_before_the_control_plane_stops(
    tmp_path: Path, mariadb: MariaDb, ports: Ports
) -> None:
    async with (
        run_single_host(tmp_path, mariadb, ports) as host,
        AsyncExitStack() as clients,
    ):
        idle, in_transaction = [await open_session(clients, host.sql_port) for _ in range(2)]
        assert error_code(await in_transaction.query("begin")) == 0
        host.process.send_signal(signal.SIGTERM)
        assert await idle.read_to_end() == b""
        assert host.child("cli.main") is not None
        assert error_code(await in_transaction.query("commit")) == 0
        assert await in_transaction.read_to_end() == b""
        async with asyncio.timeout(20):
            assert await host.process.wait() == 0


async def test_envoy_connects_with_the_certificates_of_the_command(
    tmp_path: Path, mariadb: MariaDb, ports: Ports
) -> None:
    certificates = tmp_path / "certificates"
    command = ["certificates", "init", str(certificates), "--control-plane", "127.0.0.1", "--envoy", "single"]
    init = ChildProcess("init", [*tidevoy_command(), *command], directory=tmp_path)
    assert await init.wait() == 0, init.output()
    tls = {
        "cert": str(certificates / "control-plane.pem"),
        "key": str(certificates / "control-plane.key"),
        "client_ca": str(certificates / "ca.pem"),
    }
    async with (
        run_single_host(tmp_path, mariadb, ports, certificates=certificates, xds_tls=tls) as host,
        AsyncExitStack() as clients,
    ):
        await open_session(clients, host.sql_port)


async def test_wrong_settings_end_the_service(tmp_path: Path) -> None:
    (tmp_path / "tidevoy.yaml").write_text("sql: {listen: nowhere}\n")
    command = [*tidevoy_command(), "serve", "--config", str(tmp_path / "tidevoy.yaml"), "--with-envoy"]
    process = ChildProcess("single-host", command, directory=tmp_path)
    async with asyncio.timeout(30):
        assert await process.wait() == 2
    assert "sql.listen" in process.output()
