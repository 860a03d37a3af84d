"""Actions on real processes and a real web server: they end in time, they end with us, and tell why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from controlplane.config.rollouts import ActionSettings
from controlplane.rollouts.actions import command_action
from controlplane.rollouts.actions.actions import ActionContext, run_action
from tests.support.fake_servers import http_response, run_fake_server
from tests.support.waiting import wait_until

ERRAND = ActionContext("r1", "restart", "[fd00::1]:4000", 2, "v8.5.4")
# A command that starts another program, tells both ids, and then waits for it.
FAMILY = 'sleep 600 & echo $$ $! > "$1.new"; mv "$1.new" "$1"; wait'


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def family(path: Path) -> list[int]:
    """The ids that FAMILY told."""
    await wait_until(path.exists)
    return _pids(path)


def _pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


def shell(script: str, *arguments: str, timeout: float = 60.0) -> ActionSettings:
    return ActionSettings.model_validate(
        {"command": ["sh", "-c", script, "sh", *arguments], "timeout": timeout}
    )


async def test_a_command_gets_its_words_and_none_of_our_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEVOY_API__TOKENS", "a secret")
    monkeypatch.setenv("KEPT", "kept")
    script = 'env > "$1/env"; shift; printf "%s\\n" "$@" > "$0"'
    said = tmp_path / "said"
    words = ["{address}", "{host}", "{port}", "{version}-{rollout}-{attempt}", "$(id); {}"]
    action = ActionSettings.model_validate(
        {"command": ["sh", "-c", script, str(said), str(tmp_path), *words]}
    )
    assert await run_action(action, ERRAND) == ""
    assert said.read_text().splitlines() == ["[fd00::1]:4000", "fd00::1", "4000", "v8.5.4-r1-2", "$(id); {}"]
    variables = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    ours = {name: value for name, value in variables.items() if name.startswith("TIDEVOY_")}
    assert ours == {
        "TIDEVOY_NODE": "[fd00::1]:4000",
        "TIDEVOY_ROLLOUT": "r1",
        "TIDEVOY_ACTION": "restart",
        "TIDEVOY_ATTEMPT": "2",
        "TIDEVOY_VERSION": "v8.5.4",
    }
    assert variables["KEPT"] == "kept"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", ""),
        ("echo all is well; exit 0", ""),
        ("exit 3", "ended with exit code 3"),
        ("echo first; echo 'no such\tunit' >&2; exit 1", "ended with exit code 1: no such?unit"),
        ("kill -TERM $$", "ended by SIGTERM"),
        ("head -c 100000 /dev/zero | tr '\\0' x; exit 2", "ended with exit code 2: " + "x" * 200),
        ("cat; exit 0", ""),  # its standard input is empty
    ],
)
async def test_how_a_command_failed_is_told(script: str, problem: str) -> None:
    assert await run_action(shell(script), ERRAND) == problem


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = ActionSettings.model_validate({"command": ["no-such-program"]})
    assert await run_action(missing, ERRAND) == (
        "cannot be run: no-such-program is not installed, or is no program"
    )
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    problem = await run_action(ActionSettings.model_validate({"command": [str(broken)]}), ERRAND)
    assert problem.startswith("ended with exit code 127")


async def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    problem = await run_action(shell(FAMILY, str(tmp_path / "pids"), timeout=0.5), ERRAND)
    assert problem == "had not ended after 0.5 s, and was ended by us"
    pids = await family(tmp_path / "pids")
    await wait_until(lambda: not any(map(runs, pids)))


async def test_one_that_ignores_the_request_to_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_action, "_KILL_GRACE_SECONDS", 0.2)
    problem = await run_action(shell("trap '' TERM; " + FAMILY, str(tmp_path / "pids"), timeout=0.5), ERRAND)
    assert problem == "had not ended after 0.5 s, and was ended by us"
    pids = await family(tmp_path / "pids")
    await wait_until(lambda: not any(map(runs, pids)))


async def test_a_command_is_killed_when_it_is_cancelled(tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))  # servers of other tests
    running = asyncio.create_task(run_action(shell(FAMILY, str(tmp_path / "pids")), ERRAND))
    pids = await family(tmp_path / "pids")
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    await wait_until(lambda: not any(map(runs, pids)))
    left = set(psutil.Process().children(recursive=True)) - others
    assert not left, "a child was not reaped"


async def test_what_a_command_left_running_goes_on(tmp_path: Path) -> None:
    script = 'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; exit 0'
    async with asyncio.timeout(30):
        assert await run_action(shell(script, str(tmp_path / "pids")), ERRAND) == ""
    (left,) = await family(tmp_path / "pids")
    assert runs(left)
    os.kill(left, signal.SIGKILL)


async def test_a_command_dies_with_the_control_plane(tmp_path: Path) -> None:
    parent = (
        "import asyncio, os, sys; from controlplane.rollouts.actions import command_action as command;"
        f"asyncio.run(command.run_command(['sh', '-c', {FAMILY!r}, 'sh', sys.argv[1]], dict(os.environ), 60))"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", parent, str(tmp_path / "pids"), cwd=Path(__file__).parents[3]
    )
    pids = await family(tmp_path / "pids")
    assert all(map(runs, pids))
    child.kill()
    await child.wait()
    await wait_until(lambda: not any(map(runs, pids)))


# --- webhooks ---


class Hook:
    """A web server with one answer, and the requests that it got."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append((head[0], headers, body))
        writer.write(self.answer())
        await writer.drain()


@asynccontextmanager
async def hook(answer: bytes, **more: object) -> AsyncIterator[tuple[Hook, ActionSettings]]:
    server = Hook(lambda: answer)
    async with run_fake_server(server.serve) as peer:
        url = f"http://{peer.endpoint}/restart"
        yield server, ActionSettings.model_validate({"webhook": url, "timeout": 5, **more})


async def test_a_webhook_is_asked_once_with_all_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    async with hook(http_response(204, b""), token_file=tmp_path / "token") as (server, action):
        assert await run_action(action, ERRAND) == ""
    ((line, headers, body),) = server.requests
    assert line == "POST /restart HTTP/1.1"
    assert json.loads(body) == {"rollout": "r1", "node": "[fd00::1]:4000", "version": "v8.5.4", "attempt": 2}
    assert headers["idempotency-key"] == "r1/[fd00::1]:4000/2"
    assert headers["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (http_response(500, b"oh no"), "was answered with HTTP 500"),
        (http_response(307, b"", "Location: http://127.0.0.1:1/"), "was answered with HTTP 307"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "was not answered (RemoteProtocolError), and may have been carried out"),
    ],
)
async def test_how_a_webhook_failed_is_told(answer: bytes, problem: str) -> None:
    async with hook(answer) as (server, action):
        assert await run_action(action, ERRAND) == problem
    assert len(server.requests) == 1


async def test_a_webhook_that_does_not_answer() -> None:
    async with hook(b"", timeout=1.0) as (server, action):
        problem = await run_action(action, ERRAND)
    assert problem == "was not answered within 1 s, and may have been carried out"
    assert len(server.requests) == 1


async def test_a_webhook_that_is_not_there(tmp_path: Path) -> None:
    closed = ActionSettings.model_validate({"webhook": "http://127.0.0.1:1/"})
    assert await run_action(closed, ERRAND) == ("was not begun: the webhook's server cannot be connected to")
    async with hook(http_response(204, b""), token_file=tmp_path / "token") as (server, action):
        assert (await run_action(action, ERRAND)).endswith("cannot be read: No such file or directory")
        (tmp_path / "token").write_text("two words")
        assert (await run_action(action, ERRAND)).endswith("holds no token")
    assert not server.requests
