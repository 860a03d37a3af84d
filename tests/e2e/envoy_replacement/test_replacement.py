"""Envoys that are replaced while clients work: no session is cut, nobody is turned away."""

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
    error_code,
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
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

SESSIONS, KNOCKING = 30, 24


@pytest.fixture
def alone() -> Iterator[None]:
    with network_namespace():
        yield


@asynccontextmanager
async def secured(
    directory: Path, mariadb: MariaDb, signing: SessionCertificate
) -> AsyncIterator[tuple[LocalCluster, Any]]:
    """Three nodes between which sessions move, with TLS for who wants it; and what clients trust."""
    certificates = PemFiles.create(directory / "certificates")
    shown = {"cert": str(certificates.cert), "key": str(certificates.key)}
    settings = {
        "tls": {
            "client": {"mode": "optional", **shown},
            "backend": {"mode": "required", "ca": str(certificates.ca), "verify": "full"},
        }
    }
    arguments = (
        *signing.arguments,
        *certificates.arguments(),
    )
    trusting = ssl.create_default_context(cafile=str(certificates.ca))
    async with run_cluster(
        directory / "cluster", mariadb, nodes=3, arguments=arguments, settings=settings
    ) as stack:
        yield stack, trusting


@pytest.mark.usefixtures("alone")
async def test_two_in_a_row_cut_no_session_and_turn_nobody_away(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with (
        secured(tmp_path, mariadb, signing) as (stack, trusting),
        make_supervised_envoy(stack, "envoy-b").supervised() as second,
        make_supervised_envoy(stack, "envoy-c").supervised() as third,
        run_working_sessions(stack.sql_port, SESSIONS, trusting) as (sessions, tasks),
        connect_repeatedly(stack.sql_port, KNOCKING) as knocks,
    ):
        old, new = first_admin_address(stack), second
        command = await start_replacement(
            stack, old, new.admin, "--start", new.command("start"), "--undo", new.command("stop"), "--json"
        )
        await wait_until(lambda: _stopped(old), 60)
        greeted = knocks.greeted
        before = [session.answers for session in sessions]
        # They are served on by the old one, and move between nodes, while the new one takes all that come.
        node = max((await stack.nodes()).values(), key=lambda each: int(each["sessions"] or 0))["address"]
        (await stack.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "drained"), f"{node} to be left", 60)
        await wait_until(lambda: knocks.greeted > greeted + 1000, 60)
        assert all(now.answers > had for now, had in zip(sessions, before, strict=True))
        expect_no_failures(tasks)
        assert command.returncode is None  # it waits for them
        for session in sessions:
            session.stop()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
        out, err = (text.decode() for text in await command.communicate())
        assert await command.wait() == 0, err
        assert err == ""
        steps = [json.loads(line) for line in out.splitlines()]
        assert [steps[0]["step"], steps[-1]["step"]] == ["check", "done"]
        left = [step["sessions"] for step in steps if step["step"] == "watch"]
        assert left[0] >= SESSIONS
        assert left[-1] == 0
        assert not any("caution" in step for step in steps)
        # It has told the control plane, so nothing waits for what the old one may have had.
        assert set(await get_envoys(stack)) == {"envoy-b"}
        (await stack.api.post(f"/v1/nodes/{node}/undrain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "active"), f"{node} in service")
        (await stack.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "drained"), f"{node} to be left again", 30)
        assert await accepts_sessions(old) is None

        again = await run_replacement(
            stack,
            second.admin,
            third.admin,
            "--start",
            third.command("start"),
            "--stop",
            second.command("stop"),
        )
        assert again.exit_code == 0, again.stderr
        assert set(await get_envoys(stack)) == {"envoy-c"}
        greeted = knocks.greeted
        await wait_until(lambda: knocks.greeted > greeted + 500, 60)
        # All was done already.
        idle = await run_replacement(stack, second.admin, third.admin)
        assert (idle.exit_code, "nothing to do" in idle.stdout) == (0, True)
    assert (knocks.failures, knocks.greeted > 3000) == ([], True)


async def _stopped(admin: str) -> bool:
    return await accepts_sessions(admin) is False


async def _is(stack: LocalCluster, node: str, state: str) -> bool:
    return (await stack.states()).get(node) == state


@pytest.fixture
async def plain(tmp_path: Path, mariadb: MariaDb) -> AsyncIterator[LocalCluster]:
    """One node, one Envoy with the module."""
    async with run_cluster(tmp_path / "cluster", mariadb) as stack:
        yield stack


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


@pytest.mark.usefixtures("alone")
async def test_the_script_for_systemd_goes_to_and_fro(tmp_path: Path, mariadb: MariaDb) -> None:
    """With a stand-in for systemd. The ports that the script names are free in a network of one's own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(_SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    (programs / "tidevoy").symlink_to(TIDEVOY)
    script = Path(__file__).parents[3] / "deploy" / "systemd" / "tidevoy-recycle"
    async with (
        run_cluster(tmp_path / "cluster", mariadb) as stack,
        make_supervised_envoy(stack, "envoy-a", admin="127.0.0.1:9901").supervised() as one,
        make_supervised_envoy(stack, "envoy-b", admin="127.0.0.1:9902").supervised() as other,
    ):
        environ = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CLUSTER": str(stack.directory),
            "TIDEVOY_URL": stack.control_plane.api_url,
        }

        async def ran(*arguments: str) -> tuple[int | None, str]:
            child = await asyncio.create_subprocess_exec(
                str(script),
                *arguments,
                env=environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await child.communicate()
            return child.returncode, said.decode()

        def enabled() -> set[str]:
            return {file.stem for file in stack.directory.glob("*.enabled")}

        code, said = await ran()
        assert (code, "enable the one that serves" in said) == (2, True)
        for verb in ("start", "enable"):
            await (
                await asyncio.create_subprocess_exec(
                    programs / "systemctl", verb, "tidevoy-envoy@a", env=environ
                )
            ).wait()
        await wait_until(lambda: is_up_to_date(stack, "envoy-a"))
        code, said = await ran("--dry-run")
        assert (code, enabled(), other.start_count) == (0, {"envoy-a"}, 0), said
        for serves, name in ((other, "envoy-b"), (one, "envoy-a")):
            code, said = await ran("--deadline", "30")
            assert (code, enabled()) == (0, {name}), said
            assert await accepts_sessions(serves.admin) is True
        assert await accepts_sessions(other.admin) is None


async def test_what_is_left_at_the_deadline_is_kept_or_cut(plain: LocalCluster) -> None:
    old = first_admin_address(plain)
    async with (
        make_supervised_envoy(plain, "envoy-b").supervised() as new,
        counting_client(plain.sql_port) as stays,
    ):
        assert error_code(await stays.log_in()) == 0
        start = ("--start", new.command("start"), "--deadline", "1")
        rehearsed = await run_replacement(plain, old, new.admin, *start, "--dry-run")
        assert rehearsed.exit_code == 0
        assert [line.split()[1] for line in rehearsed.stdout.splitlines()] == [
            *("start", "wait", "let", "wait", "leave", "end", "tell"),
        ]
        assert (new.start_count, await accepts_sessions(old)) == (0, True)

        kept = await run_replacement(plain, old, new.admin, *start)
        assert kept.exit_code == 1
        assert "envoy-1 still has sessions (1); they go on, and no new ones come" in kept.stderr
        assert error_code(await stays.query("do 1")) == 0
        assert await accepts_sessions(old) is False

        # Ctrl-C, and on again.
        waiting = await start_replacement(plain, old, new.admin, "--json")
        assert waiting.stdout is not None
        while json.loads(await waiting.stdout.readline())["step"] != "watch":
            pass
        waiting.send_signal(signal.SIGINT)
        _, err = await waiting.communicate()
        assert (waiting.returncode, b"run it again to go on" in err) == (1, True)
        assert error_code(await stays.query("do 1")) == 0

        swapped = await run_replacement(plain, new.admin, old)
        assert (swapped.exit_code, "if the two are not swapped" in swapped.stderr) == (1, True)
        assert await accepts_sessions(new.admin) is True

        cut = await run_replacement(plain, old, new.admin, "--deadline", "0", "--on-deadline", "cut")
        assert cut.exit_code == 0, cut.stderr
        assert await stays.read_to_end() == b""
        assert await accepts_sessions(old) is None
        assert await plain.envoy.process.wait() == 0
        assert (new.start_count, set(await get_envoys(plain))) == (1, {"envoy-b"})


async def test_an_envoy_that_cannot_take_over_leaves_the_old_one_serving(
    plain: LocalCluster, tmp_path: Path
) -> None:
    old, brief = first_admin_address(plain), ("--start-timeout", "6")

    async def serves_on() -> None:
        assert await accepts_sessions(old) is True
        async with counting_client(plain.sql_port) as another:
            assert error_code(await another.log_in()) == 0

    async with counting_client(plain.sql_port) as stays:
        assert error_code(await stays.log_in()) == 0

        # A bootstrap that Envoy does not take: it ends at once, and says why.
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text("static_resources: {listeners: 7}")
        nobody = f"127.0.0.1:{plain.ports.allocate()}"
        command = f"{plain.envoy.command()[0]} --disable-hot-restart -c {wrong}"
        refused = await run_replacement(plain, old, nobody, "--start", command, *brief)
        assert refused.exit_code == 1
        assert "returned 1" in refused.stderr
        assert "static_resources" in refused.stderr
        assert "envoy-1 serves on, and the new Envoy is ended again" in refused.stderr
        await serves_on()

        # A command that is none, and one that returns while nobody comes.
        for absent, why in (("/no/such/envoy", "cannot be run"), ("true", "still to come is not known")):
            none = await run_replacement(plain, old, nobody, "--start", absent, "--start-timeout", "1")
            assert (none.exit_code, why in none.stderr, "envoy-1 serves on" in none.stderr) == (1, True, True)
        await serves_on()

        # Not started, and nobody is to start it.
        alone = await run_replacement(plain, old, nobody)
        assert (alone.exit_code, "start the new one first" in alone.stderr) == (1, True)

        # A module of another version: it would serve, but without the module.
        claims = ('"tidevoy.module": "99.0.0" # "', '"tidevoy.module": "')
        async with make_supervised_envoy(plain, "envoy-old-module", claims).supervised() as unfit:
            worse = await run_replacement(plain, old, unfit.admin, "--start", unfit.command("start"), *brief)
            assert worse.exit_code == 1
            assert "its module is version 99.0.0" in worse.stderr
            assert "envoy-1 serves on, and the new Envoy is ended again" in worse.stderr
            assert await accepts_sessions(unfit.admin) is None
        await serves_on()

        # The same id: the control plane could not tell the two apart.
        async with make_supervised_envoy(plain, "envoy-1").supervised() as twin:
            same = await run_replacement(
                plain,
                old,
                twin.admin,
                "--start",
                twin.command("start"),
                "--undo",
                twin.command("stop"),
                *brief,
            )
            assert (
                same.exit_code,
                "both admin ports are of an Envoy with the id envoy-1" in same.stderr,
            ) == (
                1,
                True,
            )
            assert await accepts_sessions(twin.admin) is None
        await serves_on()

        # Nobody publishes to it.
        lost = (str(plain.ports.allocate()), str(plain.advertised.xds))
        async with make_supervised_envoy(plain, "envoy-stray", lost).supervised() as away:
            unheard = await run_replacement(plain, old, away.admin, "--start", away.command("start"), *brief)
            assert unheard.exit_code == 1
            assert "is not connected to the control plane" in unheard.stderr
        await serves_on()

        # Without the control plane nothing can be checked, and so nothing is begun.
        async with make_supervised_envoy(plain, "envoy-late").supervised() as late:
            await plain.control_plane.terminate()
            blind = await run_replacement(plain, old, late.admin, "--start", late.command("start"), *brief)
            assert (blind.exit_code, late.start_count) == (1, 0)
            assert "does not answer" in blind.stderr
        assert error_code(await stays.query("do 1")) == 0
        await plain.control_plane.launch()
        await serves_on()


async def test_settings_for_new_envoys_come_with_a_recycle(plain: LocalCluster) -> None:
    for envoy, why in (
        ("envoy-1", "is connected, so it has not ended"),
        ("no/such envoy", "no Envoy has the id"),
    ):
        refused = await run_tidevoy(plain.control_plane.api_url, "envoys", "forget", envoy)
        assert (refused.exit_code, why in refused.stderr) == (1, True), refused.stderr
    changed = await reload_settings(plain, backend={"connect_timeout": 2})
    assert changed["new_envoys"] == ["backend.connect_timeout"]

    async def outdated(envoy: str) -> list[str]:
        return (await get_envoys(plain))[envoy]["outdated"]  # type: ignore[no-any-return]

    await wait_until(lambda: _some(outdated("envoy-1")))
    shown = await run_tidevoy(plain.control_plane.api_url, "envoys")
    assert "`tidevoy envoys recycle` on its machine applies them and cuts no session" in shown.stderr
    async with make_supervised_envoy(plain, "envoy-b").supervised() as new:
        done = await run_replacement(
            plain, first_admin_address(plain), new.admin, "--start", new.command("start")
        )
        assert done.exit_code == 0, done.stderr
        assert await is_up_to_date(plain, "envoy-b")
        assert await outdated("envoy-b") == []
        shown = await run_tidevoy(plain.control_plane.api_url, "envoys")
        assert (shown.exit_code, shown.stderr) == (0, "")


async def _some(listed: Any) -> bool:
    return bool(await listed)
