"""Actions with real processes and a real web server: timeouts, cancellation and failure reasons."""

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

CONTEXT = ActionContext("r1", "restart", "[fd00::1]:4000", 2, "v8.5.4")
# A command that starts another program, writes both process ids and waits for the program.
PROCESS_TREE = 'sleep 600 & echo $$ $! > "$1.new"; mv "$1.new" "$1"; wait'


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_for_pids(path: Path) -> list[int]:
    """Return the process ids that PROCESS_TREE wrote."""
    await wait_until(path.exists)
    return read_pids(path)


def read_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


def shell(script: str, *arguments: str, timeout: float = 60.0) -> ActionSettings:
    return ActionSettings.model_validate(
        {"command": ["sh", "-c", script, "sh", *arguments], "timeout": timeout}
    )


async def test_command_gets_placeholders_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEVOY_API__TOKENS", "a secret")
    monkeypatch.setenv("KEPT", "kept")
    script = 'env > "$1/env"; shift; printf "%s\\n" "$@" > "$0"'
    arguments_file = tmp_path / "arguments"
    placeholders = ["{address}", "{host}", "{port}", "{version}-{rollout}-{attempt}", "$(id); {}"]
    action = ActionSettings.model_validate(
        {"command": ["sh", "-c", script, str(arguments_file), str(tmp_path), *placeholders]}
    )
    assert await run_action(action, CONTEXT) == ""
    assert arguments_file.read_text().splitlines() == [
        "[fd00::1]:4000",
        "fd00::1",
        "4000",
        "v8.5.4-r1-2",
        "$(id); {}",
    ]
    variables = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    tidevoy_variables = {name: value for name, value in variables.items() if name.startswith("TIDEVOY_")}
    assert tidevoy_variables == {
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
        ("kill -TERM $$", "was ended by SIGTERM"),
        ("head -c 100000 /dev/zero | tr '\\0' x; exit 2", "ended with exit code 2: " + "x" * 200),
        ("cat; exit 0", ""),  # its standard input is empty
    ],
)
async def test_command_failure_reason(script: str, problem: str) -> None:
    assert await run_action(shell(script), CONTEXT) == problem


async def test_missing_program_fails(tmp_path: Path) -> None:
    missing = ActionSettings.model_validate({"command": ["no-such-program"]})
    assert await run_action(missing, CONTEXT) == (
        "cannot be run: no-such-program is not installed or not executable"
    )
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    problem = await run_action(ActionSettings.model_validate({"command": [str(broken)]}), CONTEXT)
    assert problem.startswith("ended with exit code 127")


async def test_command_timeout_kills_all_its_processes(tmp_path: Path) -> None:
    problem = await run_action(shell(PROCESS_TREE, str(tmp_path / "pids"), timeout=0.5), CONTEXT)
    assert problem == "did not end within 0.5 s and was killed"
    pids = await wait_for_pids(tmp_path / "pids")
    await wait_until(lambda: not any(map(is_running, pids)))


async def test_command_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_action, "_KILL_GRACE_SECONDS", 0.2)
    problem = await run_action(
        shell("trap '' TERM; " + PROCESS_TREE, str(tmp_path / "pids"), timeout=0.5), CONTEXT
    )
    assert problem == "did not end within 0.5 s and was killed"
    pids = await wait_for_pids(tmp_path / "pids")
    await wait_until(lambda: not any(map(is_running, pids)))


async def test_cancelled_command_is_killed(tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))  # processes of other tests
    task = asyncio.create_task(run_action(shell(PROCESS_TREE, str(tmp_path / "pids")), CONTEXT))
    pids = await wait_for_pids(tmp_path / "pids")
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await wait_until(lambda: not any(map(is_running, pids)))
    remaining = set(psutil.Process().children(recursive=True)) - others
    assert not remaining, "a child was not reaped"


async def test_background_processes_of_a_command_continue(tmp_path: Path) -> None:
    script = 'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; exit 0'
    async with asyncio.timeout(30):
        assert await run_action(shell(script, str(tmp_path / "pids")), CONTEXT) == ""
    (remaining,) = await wait_for_pids(tmp_path / "pids")
    assert is_running(remaining)
    os.kill(remaining, signal.SIGKILL)


async def test_command_dies_with_the_control_plane(tmp_path: Path) -> None:
    parent = (
        "import asyncio, os, sys; from controlplane.rollouts.actions import command_action;"
        f"asyncio.run(command_action.run_command(['sh', '-c', {PROCESS_TREE!r}, 'sh', sys.argv[1]],"
        " dict(os.environ), 60))"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", parent, str(tmp_path / "pids"), cwd=Path(__file__).parents[3]
    )
    pids = await wait_for_pids(tmp_path / "pids")
    assert all(map(is_running, pids))
    child.kill()
    await child.wait()
    await wait_until(lambda: not any(map(is_running, pids)))


# --- webhooks ---


class FakeWebhook:
    """A web server that always sends the same response and records the requests."""

    def __init__(self, response: Callable[[], bytes]) -> None:
        self.response = response
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append((head[0], headers, body))
        writer.write(self.response())
        await writer.drain()


@asynccontextmanager
async def run_webhook(
    response: bytes, **overrides: object
) -> AsyncIterator[tuple[FakeWebhook, ActionSettings]]:
    server = FakeWebhook(lambda: response)
    async with run_fake_server(server.serve) as peer:
        url = f"http://{peer.endpoint}/restart"
        yield server, ActionSettings.model_validate({"webhook": url, "timeout": 5, **overrides})


async def test_webhook_is_called_once_with_all_data(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    async with run_webhook(http_response(204, b""), token_file=tmp_path / "token") as (server, action):
        assert await run_action(action, CONTEXT) == ""
    ((line, headers, body),) = server.requests
    assert line == "POST /restart HTTP/1.1"
    assert json.loads(body) == {"rollout": "r1", "node": "[fd00::1]:4000", "version": "v8.5.4", "attempt": 2}
    assert headers["idempotency-key"] == "r1/[fd00::1]:4000/2"
    assert headers["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (http_response(500, b"oh no"), "was answered with HTTP 500"),
        (http_response(307, b"", "Location: http://127.0.0.1:1/"), "was answered with HTTP 307"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "was not answered (RemoteProtocolError) and may have been executed"),
    ],
)
async def test_webhook_failure_reason(response: bytes, problem: str) -> None:
    async with run_webhook(response) as (server, action):
        assert await run_action(action, CONTEXT) == problem
    assert len(server.requests) == 1


async def test_webhook_timeout() -> None:
    async with run_webhook(b"", timeout=0.3) as (server, action):
        problem = await run_action(action, CONTEXT)
    assert problem == "was not answered within 0.3 s and may have been executed"
    assert len(server.requests) == 1


async def test_webhook_unreachable_or_without_token(tmp_path: Path) -> None:
    closed = ActionSettings.model_validate({"webhook": "http://127.0.0.1:1/"})
    assert await run_action(closed, CONTEXT) == ("was not started: cannot connect to the webhook's server")
    async with run_webhook(http_response(204, b""), token_file=tmp_path / "token") as (server, action):
        assert (await run_action(action, CONTEXT)).endswith("cannot be read: No such file or directory")
        (tmp_path / "token").write_text("two words")
        assert (await run_action(action, CONTEXT)).endswith(
            "contains no token (one line of printable ASCII without spaces)"
        )
    assert not server.requests
