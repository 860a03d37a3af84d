"""The file of the login log: changes of the setting, rotation, and outputs that take no more lines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.module.envoy import OK_PAYLOAD, connect_logged_in, with_timeout
from tests.support.module.login_log import (
    change_user,
    log_in_as,
    login_log,
    read_lines,
    serve_users,
    subset,
    wait_for_lines,
)
from tests.support.module.switchable_envoy import run_switchable
from tests.support.small_disk import small_disk
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

WRITTEN, DROPPED = ("login_log_lines", "written"), ("login_log_lines", "dropped")
WRITE_ERRORS = ("login_log_write_errors",)
LONG_NAME = b"\xff" * 256  # one line has 3 kB, because each of these bytes is escaped


async def is_alive(client: RawClient) -> bool:
    return await with_timeout(client.send_command(0x0E)) == OK_PAYLOAD


def users(log: Path) -> list[str]:
    return [line["user"] for line in read_lines(log)]


def files_of(log: Path) -> list[Path]:
    """Return the log's file and its rotated files, the newest first."""
    return sorted(log.parent.glob(f"{log.name}*"))


async def test_log_is_switched_while_sessions_go_on(tmp_path: Path) -> None:
    one, other = tmp_path / "one.log", tmp_path / "other.log"
    async with run_switchable(serve_users, tmp_path) as switchable:
        session, _ = await log_in_as(switchable.envoy, b"a")
        threads = switchable.envoy.thread_names()
        assert "tidevoy-logins" not in threads
        for step, (live_settings, user) in enumerate(
            [(login_log(one), b"b"), (login_log(other), b"c"), ({}, b"d"), (login_log(one, 1 << 20), b"e")]
        ):
            await switchable.apply(live_settings)
            await log_in_as(switchable.envoy, user)
            assert await is_alive(session), step
        await wait_until(lambda: users(one) == ["b", "e"])
        assert users(other) == ["c"]
        await switchable.envoy.wait_for_metrics({WRITTEN: 3, DROPPED: 0, WRITE_ERRORS: 0})
        await switchable.apply({})
        await wait_until(lambda: switchable.envoy.thread_names() == threads)
        assert await is_alive(session)


async def test_module_rotates_the_file(tmp_path: Path) -> None:
    log = tmp_path / "logins.log"
    async with run_switchable(serve_users, tmp_path, login_log(log, max_bytes=10_000, keep=2)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        for _ in range(12):
            assert await change_user(client, LONG_NAME, LONG_NAME) == OK_PAYLOAD
        await switchable.envoy.wait_for_metrics({WRITTEN: 13})
        files = files_of(log)
        assert [file.name for file in files] == ["logins.log", "logins.log.1", "logins.log.2"]
        assert all(read_lines(file) and file.stat().st_size <= 10_000 for file in files)


async def test_renamed_file_gets_no_more_lines(tmp_path: Path) -> None:
    log, renamed = tmp_path / "logins.log", tmp_path / "renamed.log"
    async with run_switchable(serve_users, tmp_path, login_log(log)) as switchable:
        await log_in_as(switchable.envoy, b"before")
        await wait_for_lines(log, 1)
        log.rename(renamed)
        await log_in_as(switchable.envoy, b"after")
        await wait_for_lines(log, 1)
        assert (users(renamed), users(log)) == (["before"], ["after"])


async def test_standard_output_gets_lines_and_is_not_rotated(tmp_path: Path) -> None:
    async with run_switchable(serve_users, tmp_path, login_log("/dev/stdout", max_bytes=1)) as switchable:
        envoy = switchable.envoy
        for user in (b"first-user", b"second-user"):
            await log_in_as(envoy, user)
        await wait_until(lambda: '"user":"second-user"' in envoy.log)
        assert '"user":"first-user"' in envoy.log
        await envoy.wait_for_metrics({WRITTEN: 2, WRITE_ERRORS: 0})


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/directory/logins.log"])
async def test_errors_are_counted_and_logged_once(tmp_path: Path, path: str) -> None:
    async with run_switchable(serve_users, tmp_path, login_log(path)) as switchable:
        envoy = switchable.envoy
        session = await connect_logged_in(envoy)

        async def has_retried() -> bool:
            return (await envoy.metrics()).get(("login_log_write_errors", ()), 0) >= 2

        await wait_until(has_retried)
        await connect_logged_in(envoy)
        assert await is_alive(session)
        assert envoy.log.count(f"logins cannot be logged to {path}") == 1
        # Lines that can no longer be written are dropped.
        await switchable.apply({})
        await envoy.wait_for_metrics({WRITTEN: 0, DROPPED: 2})


async def test_lines_appear_again_when_the_disk_has_space(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        log = disk.path / "logins.log"
        async with run_switchable(serve_users, tmp_path, login_log(log)) as switchable:
            envoy = switchable.envoy
            session, _ = await log_in_as(envoy, b"before")
            await wait_for_lines(log, 1)
            disk.fill()
            for _ in range(20):  # the file's last page has room for one or two lines
                assert await change_user(session, LONG_NAME) == OK_PAYLOAD

            async def has_failed() -> bool:
                return (await envoy.metrics())["login_log_write_errors", ()] > 0

            await wait_until(has_failed)
            await log_in_as(envoy, b"meanwhile")
            assert await is_alive(session)
            disk.free()
            lines = await wait_for_lines(log, 22)
            assert (lines[0]["user"], lines[-1]["user"]) == ("before", "meanwhile")
            assert await is_alive(session)
            await envoy.wait_for_metrics({WRITTEN: 22, DROPPED: 0})
            assert "are logged to" in envoy.log


async def test_stalled_reader_stops_neither_sessions_nor_another_log_nor_envoy(tmp_path: Path) -> None:
    fifo, log = tmp_path / "fifo", tmp_path / "logins.log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    try:
        async with run_switchable(serve_users, tmp_path, login_log(fifo)) as switchable:
            envoy = switchable.envoy
            client, _ = await log_in_as(envoy, b"app")

            async def has_dropped_lines() -> bool:
                for _ in range(100):
                    assert await change_user(client, LONG_NAME, LONG_NAME) == OK_PAYLOAD
                return (await envoy.metrics()).get(("login_log_lines", ("dropped",)), 0) > 0

            await wait_until(has_dropped_lines, 40)
            await switchable.apply(login_log(log))
            assert await change_user(client, b"other") == OK_PAYLOAD
            (line,) = await wait_for_lines(log, 1)
            assert subset(line, "kind", "user") == ("change_user", "other")
            async with asyncio.timeout(4):
                await envoy.stop()
    finally:
        os.close(reader)
