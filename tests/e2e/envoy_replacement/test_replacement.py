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

from sandbox.local_cluster import Stack
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.clients.server import Certificates
from tests.support.controlplane.cli_process import TIDEVOY, tidevoy
from tests.support.e2e.cluster import client, cluster, code, configure, fleet, follows
from tests.support.e2e.envoy_replacement import (
    accepts,
    first,
    knocking,
    recycle,
    recycling,
    service,
    unhurt,
    working,
)
from tests.support.network_namespace import own_network
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(180)

SESSIONS, KNOCKING = 30, 24


@pytest.fixture
def alone() -> Iterator[None]:
    with own_network():
        yield


@asynccontextmanager
async def secured(
    directory: Path, mariadb: MariaDb, signing: SessionCertificate
) -> AsyncIterator[tuple[Stack, Any]]:
    """Three nodes between which sessions move, with TLS for who wants it; and what clients trust."""
    certificates = Certificates.make(directory / "certificates")
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
    async with cluster(
        directory / "cluster", mariadb, nodes=3, arguments=arguments, settings=settings
    ) as stack:
        yield stack, trusting


@pytest.mark.usefixtures("alone")
async def test_two_in_a_row_cut_no_session_and_turn_nobody_away(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with (
        secured(tmp_path, mariadb, signing) as (stack, trusting),
        service(stack, "envoy-b").supervised() as second,
        service(stack, "envoy-c").supervised() as third,
        working(stack.sql_port, SESSIONS, trusting) as (sessions, tasks),
        knocking(stack.sql_port, KNOCKING) as knocks,
    ):
        old, new = first(stack), second
        command = await recycling(
            stack, old, new.admin, "--start", new.command("start"), "--undo", new.command("stop"), "--json"
        )
        await until(lambda: _stopped(old), 60)
        greeted = knocks.greeted
        before = [session.answers for session in sessions]
        # They are served on by the old one, and move between nodes, while the new one takes all that come.
        node = max((await stack.nodes()).values(), key=lambda each: int(each["sessions"] or 0))["address"]
        (await stack.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "drained"), f"{node} to be left", 60)
        await until(lambda: knocks.greeted > greeted + 1000, 60)
        assert all(now.answers > had for now, had in zip(sessions, before, strict=True))
        unhurt(tasks)
        assert command.returncode is None  # it waits for them
        for session in sessions:
            session.end()
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
        assert set(await fleet(stack)) == {"envoy-b"}
        (await stack.api.post(f"/v1/nodes/{node}/undrain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "active"), f"{node} in service")
        (await stack.api.post(f"/v1/nodes/{node}/drain")).raise_for_status()
        await stack.wait_until(lambda: _is(stack, node, "drained"), f"{node} to be left again", 30)
        assert await accepts(old) is None

        again = await recycle(
            stack,
            second.admin,
            third.admin,
            "--start",
            third.command("start"),
            "--stop",
            second.command("stop"),
        )
        assert again.code == 0, again.err
        assert set(await fleet(stack)) == {"envoy-c"}
        greeted = knocks.greeted
        await until(lambda: knocks.greeted > greeted + 500, 60)
        # All was done already.
        idle = await recycle(stack, second.admin, third.admin)
        assert (idle.code, "nothing to do" in idle.out) == (0, True)
    assert (knocks.failures, knocks.greeted > 3000) == ([], True)


async def _stopped(admin: str) -> bool:
    return await accepts(admin) is False


async def _is(stack: Stack, node: str, state: str) -> bool:
    return (await stack.states()).get(node) == state


@pytest.fixture
async def plain(tmp_path: Path, mariadb: MariaDb) -> AsyncIterator[Stack]:
    """One node, one Envoy with the module."""
    async with cluster(tmp_path / "cluster", mariadb) as stack:
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
        cluster(tmp_path / "cluster", mariadb) as stack,
        service(stack, "envoy-a", admin="127.0.0.1:9901").supervised() as one,
        service(stack, "envoy-b", admin="127.0.0.1:9902").supervised() as other,
    ):
        environ = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CLUSTER": str(stack.directory),
            "TIDEVOY_URL": stack.control_plane.api,
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
        await until(lambda: follows(stack, "envoy-a"))
        code, said = await ran("--dry-run")
        assert (code, enabled(), other.starts) == (0, {"envoy-a"}, 0), said
        for serves, name in ((other, "envoy-b"), (one, "envoy-a")):
            code, said = await ran("--deadline", "30")
            assert (code, enabled()) == (0, {name}), said
            assert await accepts(serves.admin) is True
        assert await accepts(other.admin) is None


async def test_what_is_left_at_the_deadline_is_kept_or_cut(plain: Stack) -> None:
    old = first(plain)
    async with (
        service(plain, "envoy-b").supervised() as new,
        client(plain.sql_port) as stays,
    ):
        assert code(await stays.enter()) == 0
        start = ("--start", new.command("start"), "--deadline", "1")
        rehearsed = await recycle(plain, old, new.admin, *start, "--dry-run")
        assert rehearsed.code == 0
        assert [line.split()[1] for line in rehearsed.out.splitlines()] == [
            *("start", "wait", "let", "wait", "leave", "end", "tell"),
        ]
        assert (new.starts, await accepts(old)) == (0, True)

        kept = await recycle(plain, old, new.admin, *start)
        assert kept.code == 1
        assert "envoy-1 still has sessions (1); they go on, and no new ones come" in kept.err
        assert code(await stays.query("do 1")) == 0
        assert await accepts(old) is False

        # Ctrl-C, and on again.
        waiting = await recycling(plain, old, new.admin, "--json")
        assert waiting.stdout is not None
        while json.loads(await waiting.stdout.readline())["step"] != "watch":
            pass
        waiting.send_signal(signal.SIGINT)
        _, err = await waiting.communicate()
        assert (waiting.returncode, b"run it again to go on" in err) == (1, True)
        assert code(await stays.query("do 1")) == 0

        swapped = await recycle(plain, new.admin, old)
        assert (swapped.code, "if the two are not swapped" in swapped.err) == (1, True)
        assert await accepts(new.admin) is True

        cut = await recycle(plain, old, new.admin, "--deadline", "0", "--on-deadline", "cut")
        assert cut.code == 0, cut.err
        assert await stays.rest() == b""
        assert await accepts(old) is None
        assert await plain.envoy.process.wait() == 0
        assert (new.starts, set(await fleet(plain))) == (1, {"envoy-b"})


async def test_an_envoy_that_cannot_take_over_leaves_the_old_one_serving(
    plain: Stack, tmp_path: Path
) -> None:
    old, brief = first(plain), ("--start-timeout", "6")

    async def serves_on() -> None:
        assert await accepts(old) is True
        async with client(plain.sql_port) as another:
            assert code(await another.enter()) == 0

    async with client(plain.sql_port) as stays:
        assert code(await stays.enter()) == 0

        # A bootstrap that Envoy does not take: it ends at once, and says why.
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text("static_resources: {listeners: 7}")
        nobody = f"127.0.0.1:{plain.ports.take()}"
        command = f"{plain.envoy.command()[0]} --disable-hot-restart -c {wrong}"
        refused = await recycle(plain, old, nobody, "--start", command, *brief)
        assert refused.code == 1
        assert "returned 1" in refused.err
        assert "static_resources" in refused.err
        assert "envoy-1 serves on, and the new Envoy is ended again" in refused.err
        await serves_on()

        # A command that is none, and one that returns while nobody comes.
        for absent, why in (("/no/such/envoy", "cannot be run"), ("true", "still to come is not known")):
            none = await recycle(plain, old, nobody, "--start", absent, "--start-timeout", "1")
            assert (none.code, why in none.err, "envoy-1 serves on" in none.err) == (1, True, True)
        await serves_on()

        # Not started, and nobody is to start it.
        alone = await recycle(plain, old, nobody)
        assert (alone.code, "start the new one first" in alone.err) == (1, True)

        # A module of another version: it would serve, but without the module.
        claims = ('"tidevoy.module": "99.0.0" # "', '"tidevoy.module": "')
        async with service(plain, "envoy-old-module", claims).supervised() as unfit:
            worse = await recycle(plain, old, unfit.admin, "--start", unfit.command("start"), *brief)
            assert worse.code == 1
            assert "its module is version 99.0.0" in worse.err
            assert "envoy-1 serves on, and the new Envoy is ended again" in worse.err
            assert await accepts(unfit.admin) is None
        await serves_on()

        # The same id: the control plane could not tell the two apart.
        async with service(plain, "envoy-1").supervised() as twin:
            same = await recycle(
                plain,
                old,
                twin.admin,
                "--start",
                twin.command("start"),
                "--undo",
                twin.command("stop"),
                *brief,
            )
            assert (same.code, "both admin ports are of an Envoy with the id envoy-1" in same.err) == (
                1,
                True,
            )
            assert await accepts(twin.admin) is None
        await serves_on()

        # Nobody publishes to it.
        lost = (str(plain.ports.take()), str(plain.advertised.xds))
        async with service(plain, "envoy-stray", lost).supervised() as away:
            unheard = await recycle(plain, old, away.admin, "--start", away.command("start"), *brief)
            assert unheard.code == 1
            assert "is not connected to the control plane" in unheard.err
        await serves_on()

        # Without the control plane nothing can be checked, and so nothing is begun.
        async with service(plain, "envoy-late").supervised() as late:
            await plain.control_plane.terminate()
            blind = await recycle(plain, old, late.admin, "--start", late.command("start"), *brief)
            assert (blind.code, late.starts) == (1, 0)
            assert "does not answer" in blind.err
        assert code(await stays.query("do 1")) == 0
        await plain.control_plane.launch()
        await serves_on()


async def test_settings_for_new_envoys_come_with_a_recycle(plain: Stack) -> None:
    for envoy, why in (
        ("envoy-1", "is connected, so it has not ended"),
        ("no/such envoy", "no Envoy has the id"),
    ):
        refused = await tidevoy(plain.control_plane.api, "envoys", "forget", envoy)
        assert (refused.code, why in refused.err) == (1, True), refused.err
    changed = await configure(plain, backend={"connect_timeout": 2})
    assert changed["new_envoys"] == ["backend.connect_timeout"]

    async def outdated(envoy: str) -> list[str]:
        return (await fleet(plain))[envoy]["outdated"]  # type: ignore[no-any-return]

    await until(lambda: _some(outdated("envoy-1")))
    shown = await tidevoy(plain.control_plane.api, "envoys")
    assert "`tidevoy envoys recycle` on its machine applies them and cuts no session" in shown.err
    async with service(plain, "envoy-b").supervised() as new:
        done = await recycle(plain, first(plain), new.admin, "--start", new.command("start"))
        assert done.code == 0, done.err
        assert await follows(plain, "envoy-b")
        assert await outdated("envoy-b") == []
        shown = await tidevoy(plain.control_plane.api, "envoys")
        assert (shown.code, shown.err) == (0, "")


async def _some(listed: Any) -> bool:
    return bool(await listed)
