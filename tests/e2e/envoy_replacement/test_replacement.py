"""Envoy replacement under load: no session is cut, no connection is rejected."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.clients.server import PemFiles
from tests.support.controlplane.cli_process import TIDEVOY, run_tidevoy
from tests.support.e2e.cluster import (
    counting_client,
    get_envoys,
    is_up_to_date,
    reload_settings,
    run_cluster,
)
from tests.support.e2e.envoy_replacement import (
    accepts_sessions,
    connect_repeatedly,
    expect_no_failures,
    first_admin_address,
    make_supervised_envoy,
    run_replacement,
    run_working_sessions,
    start_replacement,
)
from tests.support.network_namespace import network_namespace
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

SESSIONS, CONNECTING_CLIENTS = 30, 24


@pytest.fixture
def isolated_network() -> Iterator[None]:
    with network_namespace():
        yield


@asynccontextmanager
async def run_tls_cluster(
    directory: Path, mariadb: MariaDb, signing: SessionCertificate
) -> AsyncIterator[tuple[LocalCluster, Any]]:
    """Run three nodes with session migration and TLS. Yield the cluster and the clients' TLS context."""
    certificates = PemFiles.create(directory / "certificates")
    certificate_files = {"cert": str(certificates.cert), "key": str(certificates.key)}
    settings = {
        "tls": {
            "client": {"mode": "optional", **certificate_files},
            "backend": {"mode": "required", "ca": str(certificates.ca), "verify": "full"},
        }
    }
    arguments = (
        *signing.arguments,
        *certificates.arguments(),
    )
    tls_context = ssl.create_default_context(cafile=str(certificates.ca))
    async with run_cluster(
        directory / "cluster", mariadb, nodes=3, arguments=arguments, settings=settings
    ) as cluster:
        yield cluster, tls_context


@pytest.mark.usefixtures("isolated_network")
async def test_consecutive_replacements_keep_all_sessions(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with (
        run_tls_cluster(tmp_path, mariadb, signing) as (cluster, tls_context),
        make_supervised_envoy(cluster, "envoy-b").supervised() as second,
        make_supervised_envoy(cluster, "envoy-c").supervised() as third,
        run_working_sessions(cluster.sql_port, SESSIONS, tls_context) as (sessions, tasks),
        connect_repeatedly(cluster.sql_port, CONNECTING_CLIENTS) as connections,
    ):
        old, new = first_admin_address(cluster), second
        command = await start_replacement(
            cluster, old, new.admin, "--start", new.command("start"), "--undo", new.command("stop"), "--json"
        )
        await wait_until(lambda: _has_stopped_accepting(old), 60)
        greeted = connections.greeted
        responses_before = [session.answers for session in sessions]
        # The old Envoy still serves and migrates its sessions. The new Envoy accepts all new sessions.
        nodes = (await cluster.nodes()).values()
        node = max(nodes, key=lambda status: int(status["sessions"] or 0))["address"]
        (await cluster.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await cluster.wait_until(lambda: _is_in_state(cluster, node, "drained"), f"{node} to be left", 60)
        await wait_until(lambda: connections.greeted > greeted + 300, 60)
        assert all(session.answers > count for session, count in zip(sessions, responses_before, strict=True))
        expect_no_failures(tasks)
        assert command.returncode is None  # the command waits for the sessions to end
        for session in sessions:
            session.stop()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
        out, err = (text.decode() for text in await command.communicate())
        assert await command.wait() == 0, err
        assert err == ""
        steps = [json.loads(line) for line in out.splitlines()]
        assert [steps[0]["step"], steps[-1]["step"]] == ["check", "done"]
        sessions_left = [step["sessions"] for step in steps if step["step"] == "watch"]
        assert sessions_left[0] >= SESSIONS
        assert sessions_left[-1] == 0
        assert not any("caution" in step for step in steps)
        # The command has removed the old Envoy from the control plane, so no drain waits for its sessions.
        assert set(await get_envoys(cluster)) == {"envoy-b"}
        (await cluster.api.post(f"/v1/nodes/{node}/undrain")).raise_for_status()
        await cluster.wait_until(lambda: _is_in_state(cluster, node, "active"), f"{node} in service")
        (await cluster.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await cluster.wait_until(
            lambda: _is_in_state(cluster, node, "drained"), f"{node} to be left again", 30
        )
        assert await accepts_sessions(old) is None

        repeated = await run_replacement(
            cluster,
            second.admin,
            third.admin,
            "--start",
            third.command("start"),
            "--stop",
            second.command("stop"),
        )
        assert repeated.exit_code == 0, repeated.stderr
        assert set(await get_envoys(cluster)) == {"envoy-c"}
        greeted = connections.greeted
        await wait_until(lambda: connections.greeted > greeted + 500, 60)
        finished = await run_replacement(cluster, second.admin, third.admin)
        assert (finished.exit_code, "nothing to do" in finished.stdout) == (0, True)
    assert (connections.failures, connections.greeted > 3000) == ([], True)


async def _has_stopped_accepting(admin: str) -> bool:
    return await accepts_sessions(admin) is False


async def _is_in_state(cluster: LocalCluster, node: str, state: str) -> bool:
    return (await cluster.states()).get(node) == state


@pytest.fixture
async def one_node_cluster(tmp_path: Path, mariadb: MariaDb) -> AsyncIterator[LocalCluster]:
    """Run a cluster with one node and one Envoy with the module."""
    async with run_cluster(tmp_path / "cluster", mariadb) as cluster:
        yield cluster


_SYSTEMCTL = """#!/bin/sh
verb=$1 unit=""
for word; do unit=$word; done
name=envoy-${unit#tidevoy-envoy@}
case $verb in
    start | stop) echo "$verb" > "$CLUSTER/$name.fifo"; echo "$verb" > "$CLUSTER/$name.verb" ;;
    enable) touch "$CLUSTER/$name.enabled" ;;
    disable) rm "$CLUSTER/$name.enabled" ;;
    is-enabled) test -e "$CLUSTER/$name.enabled" ;;
    is-active) test "$(cat "$CLUSTER/$name.verb")" = start ;;
esac
"""


@pytest.mark.usefixtures("isolated_network")
async def test_systemd_script_alternates_between_two_envoys(tmp_path: Path, mariadb: MariaDb) -> None:
    """The script uses a fake systemctl, and fixed ports, which are free in an isolated network namespace."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(_SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    (programs / "tidevoy").symlink_to(TIDEVOY)
    script = Path(__file__).parents[3] / "deploy" / "systemd" / "tidevoy-replace-envoy"
    async with (
        run_cluster(tmp_path / "cluster", mariadb) as cluster,
        make_supervised_envoy(cluster, "envoy-a", admin="127.0.0.1:9901").supervised() as envoy_a,
        make_supervised_envoy(cluster, "envoy-b", admin="127.0.0.1:9902").supervised() as envoy_b,
    ):
        environ = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CLUSTER": str(cluster.directory),
            "TIDEVOY_URL": cluster.control_plane.api_url,
        }

        async def run_script(*arguments: str) -> tuple[int | None, str]:
            child = await asyncio.create_subprocess_exec(
                str(script),
                *arguments,
                env=environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await child.communicate()
            return child.returncode, output.decode()

        def enabled() -> set[str]:
            return {file.stem for file in cluster.directory.glob("*.enabled")}

        code, output = await run_script()
        assert (code, "enable the one that serves" in output) == (2, True)
        for verb in ("start", "enable"):
            await (
                await asyncio.create_subprocess_exec(
                    programs / "systemctl", verb, "tidevoy-envoy@a", env=environ
                )
            ).wait()
        await wait_until(lambda: is_up_to_date(cluster, "envoy-a"))
        code, output = await run_script("--dry-run")
        assert (code, enabled(), envoy_b.start_count) == (0, {"envoy-a"}, 0), output
        for new_envoy, name in ((envoy_b, "envoy-b"), (envoy_a, "envoy-a")):
            code, output = await run_script("--deadline", "30")
            assert (code, enabled()) == (0, {name}), output
            assert await accepts_sessions(new_envoy.admin) is True
        assert await accepts_sessions(envoy_b.admin) is None


async def test_deadline_keeps_or_cuts_remaining_sessions(one_node_cluster: LocalCluster) -> None:
    old = first_admin_address(one_node_cluster)
    async with (
        make_supervised_envoy(one_node_cluster, "envoy-b").supervised() as new,
        counting_client(one_node_cluster.sql_port) as client,
    ):
        assert error_code(await client.log_in()) == 0
        start = ("--start", new.command("start"), "--deadline", "1")
        dry_run = await run_replacement(one_node_cluster, old, new.admin, *start, "--dry-run")
        assert dry_run.exit_code == 0
        assert [line.split()[1] for line in dry_run.stdout.splitlines()] == [
            *("start", "wait", "make", "wait", "keep", "stop", "remove"),
        ]
        options = ("--old-admin", old, "--new-admin", new.admin, *start, "--dry-run")
        without_control_plane = await run_tidevoy("http://127.0.0.1:1", "envoys", "replace", *options)
        assert without_control_plane.exit_code == 1
        assert (new.start_count, await accepts_sessions(old)) == (0, True)

        kept = await run_replacement(one_node_cluster, old, new.admin, *start)
        assert kept.exit_code == 1
        assert "envoy-1 still has sessions (1); they stay open, and no new ones start" in kept.stderr
        assert error_code(await client.query("do 1")) == 0
        assert await accepts_sessions(old) is False

        # Interrupt the command with Ctrl-C. Later runs continue the replacement.
        waiting = await start_replacement(one_node_cluster, old, new.admin, "--json")
        assert waiting.stdout is not None
        while json.loads(await waiting.stdout.readline())["step"] != "watch":
            pass
        waiting.send_signal(signal.SIGINT)
        _, err = await waiting.communicate()
        assert (waiting.returncode, b"run the command again to continue" in err) == (1, True)
        assert error_code(await client.query("do 1")) == 0

        swapped = await run_replacement(one_node_cluster, new.admin, old)
        assert (swapped.exit_code, "--old-admin and --new-admin are not swapped" in swapped.stderr) == (
            1,
            True,
        )
        assert await accepts_sessions(new.admin) is True

        cut = await run_replacement(
            one_node_cluster, old, new.admin, "--deadline", "0", "--on-deadline", "close"
        )
        assert cut.exit_code == 0, cut.stderr
        assert await client.read_to_end() == b""
        assert await accepts_sessions(old) is None
        assert await one_node_cluster.envoy.process.wait() == 0
        assert (new.start_count, set(await get_envoys(one_node_cluster))) == (1, {"envoy-b"})


async def test_failed_takeover_leaves_the_old_envoy_serving(
    one_node_cluster: LocalCluster, tmp_path: Path
) -> None:
    old, timeout = first_admin_address(one_node_cluster), ("--start-timeout", "6")

    async def expect_old_envoy_serves() -> None:
        assert await accepts_sessions(old) is True
        async with counting_client(one_node_cluster.sql_port) as new_client:
            assert error_code(await new_client.log_in()) == 0

    async with counting_client(one_node_cluster.sql_port) as client:
        assert error_code(await client.log_in()) == 0

        # With an invalid bootstrap, the new Envoy exits at once and prints the reason.
        invalid = tmp_path / "invalid.yaml"
        invalid.write_text("static_resources: {listeners: 7}")
        unused_admin = f"127.0.0.1:{one_node_cluster.ports.allocate()}"
        command = f"{one_node_cluster.envoy.command()[0]} --disable-hot-restart -c {invalid}"
        result = await run_replacement(one_node_cluster, old, unused_admin, "--start", command, *timeout)
        assert result.exit_code == 1
        assert "returned 1" in result.stderr
        assert "static_resources" in result.stderr
        assert "envoy-1 keeps serving, and the new Envoy is stopped again" in result.stderr
        await expect_old_envoy_serves()

        # The start command does not exist, or returns without starting an Envoy.
        for start, reason in (("/no/such/envoy", "cannot be run"), ("true", "the new Envoy may still start")):
            result = await run_replacement(
                one_node_cluster, old, unused_admin, "--start", start, "--start-timeout", "1"
            )
            assert result.exit_code == 1
            assert reason in result.stderr
            assert "envoy-1 keeps serving" in result.stderr
        await expect_old_envoy_serves()

        # No new Envoy runs, and there is no command to start it.
        result = await run_replacement(one_node_cluster, old, unused_admin)
        assert (result.exit_code, "start the new Envoy first" in result.stderr) == (1, True)

        # The new Envoy has a module of another version, so it would serve without the module.
        async with make_supervised_envoy(
            one_node_cluster,
            "envoy-old-module",
            old_text='"tidevoy.module": "',
            new_text='"tidevoy.module": "99.0.0" # "',
        ).supervised() as new:
            result = await run_replacement(
                one_node_cluster, old, new.admin, "--start", new.command("start"), *timeout
            )
            assert result.exit_code == 1
            assert "its module is version 99.0.0" in result.stderr
            assert "envoy-1 keeps serving, and the new Envoy is stopped again" in result.stderr
            assert await accepts_sessions(new.admin) is None
        await expect_old_envoy_serves()

        # The new Envoy has the id of the old one, so the control plane could not distinguish them.
        async with make_supervised_envoy(one_node_cluster, "envoy-1").supervised() as twin:
            result = await run_replacement(
                one_node_cluster,
                old,
                twin.admin,
                "--start",
                twin.command("start"),
                "--undo",
                twin.command("stop"),
                *timeout,
            )
            assert result.exit_code == 1
            assert "both admin ports belong to an Envoy with the id envoy-1" in result.stderr
            assert await accepts_sessions(twin.admin) is None
        await expect_old_envoy_serves()

        # The new Envoy's xDS address is wrong, so it never connects to the control plane.
        async with make_supervised_envoy(
            one_node_cluster,
            "envoy-stray",
            old_text=str(one_node_cluster.advertised.xds),
            new_text=str(one_node_cluster.ports.allocate()),
        ).supervised() as new:
            result = await run_replacement(
                one_node_cluster, old, new.admin, "--start", new.command("start"), *timeout
            )
            assert result.exit_code == 1
            assert "is not connected to the control plane" in result.stderr
        await expect_old_envoy_serves()

        # Without the control plane no check is possible, so the new Envoy is not started.
        async with make_supervised_envoy(one_node_cluster, "envoy-late").supervised() as new:
            await one_node_cluster.control_plane.terminate()
            result = await run_replacement(
                one_node_cluster, old, new.admin, "--start", new.command("start"), *timeout
            )
            assert (result.exit_code, new.start_count) == (1, 0)
            assert "does not answer" in result.stderr
        assert error_code(await client.query("do 1")) == 0
        await one_node_cluster.control_plane.launch()
        await expect_old_envoy_serves()


async def test_replacement_applies_settings_for_new_envoys(one_node_cluster: LocalCluster) -> None:
    for envoy, reason in (
        ("envoy-1", "is connected, so it is still running"),
        ("no/such envoy", "no Envoy has the id"),
    ):
        rejected = await run_tidevoy(one_node_cluster.control_plane.api_url, "envoys", "forget", envoy)
        assert (rejected.exit_code, reason in rejected.stderr) == (1, True), rejected.stderr
    sql = {**one_node_cluster.control_plane.settings["sql"], "access_log": "/dev/null"}
    changed = await reload_settings(one_node_cluster, sql=sql)
    assert changed["needs_new_envoys"] == ["sql.access_log"]

    async def stale_resources(envoy: str) -> list[str]:
        return (await get_envoys(one_node_cluster))[envoy]["stale_resources"]  # type: ignore[no-any-return]

    await wait_until(lambda: _is_not_empty(stale_resources("envoy-1")))
    envoys = await run_tidevoy(one_node_cluster.control_plane.api_url, "envoys")
    assert "`tidevoy envoys replace` on its machine applies them without cutting a session" in envoys.stderr
    async with make_supervised_envoy(one_node_cluster, "envoy-b").supervised() as new:
        result = await run_replacement(
            one_node_cluster,
            first_admin_address(one_node_cluster),
            new.admin,
            "--start",
            new.command("start"),
        )
        assert result.exit_code == 0, result.stderr
        assert await is_up_to_date(one_node_cluster, "envoy-b")
        assert await stale_resources("envoy-b") == []
        envoys = await run_tidevoy(one_node_cluster.control_plane.api_url, "envoys")
        assert (envoys.exit_code, envoys.stderr) == (0, "")


async def _is_not_empty(items: Any) -> bool:
    return bool(await items)
