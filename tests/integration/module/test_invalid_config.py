"""A configuration that does not fit is refused by Envoy at start, and its log says what to do."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from sandbox.child_process import ProcessFailed
from sandbox.envoy import envoy_binary
from tests.support.clients.server import PemFiles
from tests.support.module.bootstrap import ModuleConfig, bootstrap
from tests.support.module.envoy import run_envoy

OTHER = "the control plane is version 0.2.0, and this module 0.1.0: run an Envoy image of the"


@pytest.fixture
def pair(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


REFUSED = {
    "a filter's unknown key": (
        ModuleConfig(session={"speed": 9}),
        'network filter "session"',
        "unknown field `speed`",
    ),
    "a socket's unknown key": (
        ModuleConfig(client={"speed": 9}),
        'transport socket "client"',
        "unknown field `speed`",
    ),
    "a node's unknown key": (
        ModuleConfig(node={"speed": 9}),
        'transport socket "node"',
        "unknown field `speed`",
    ),
    "a policy's unknown key": (
        ModuleConfig(policy={"speed": 9}),
        'load-balancing policy "least_sessions"',
        "unknown field `speed`",
    ),
    "an extension's unknown key": (
        ModuleConfig(telemetry={"speed": 9}),
        'bootstrap extension "telemetry"',
        "unknown field `speed`",
    ),
    "an unknown word": (
        ModuleConfig(client={"tls": "maybe"}),
        'transport socket "client"',
        "unknown variant `maybe`",
    ),
    "another type": (
        ModuleConfig(live={"login_timeout": "soon"}),
        'listener filter "live_config"',
        "invalid type",
    ),
    "another version": (ModuleConfig(version="0.2.0"), "", OTHER),
    "no certificate": (
        ModuleConfig(client={"tls": "optional", "cert": "/no/cert.pem", "key": "/no/key.pem"}),
        'transport socket "client"',
        "cannot read /no/cert.pem: No such file or directory",
    ),
    "no CA": (
        ModuleConfig(node={"tls": "required", "ca": "/no/ca.pem", "verify": "full"}),
        'transport socket "node"',
        "cannot read /no/ca.pem: No such file or directory",
    ),
    "no RSA key": (
        ModuleConfig(client={"rsa_key": "/no/rsa.pem"}),
        'transport socket "client"',
        "cannot read /no/rsa.pem",
    ),
}


@pytest.mark.parametrize(("parts", "part", "text"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_does_not_fit_is_refused(
    tmp_path: Path, parts: ModuleConfig, part: str, text: str
) -> None:
    with pytest.raises(ProcessFailed) as failed:
        async with run_envoy(tmp_path, ["127.0.0.1:1"], parts):
            pass
    assert f"the configuration of the {part}" in failed.value.log
    assert text in failed.value.log


async def test_a_pair_that_does_not_match_is_refused(tmp_path: Path, pair: PemFiles) -> None:
    other = PemFiles.create(tmp_path / "other")
    parts = ModuleConfig(client={"tls": "optional", "cert": str(pair.cert), "key": str(other.key)})
    with pytest.raises(ProcessFailed, match="does not belong to the first certificate in"):
        async with run_envoy(tmp_path, ["127.0.0.1:1"], parts):
            pass


async def test_a_missing_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"no-such\.so"):
        async with run_envoy(tmp_path, ["127.0.0.1:1"], ModuleConfig(module=Path("/no-such.so"))):
            pass


def threads_of(pid: int) -> set[str]:
    """Names of a process's threads; none when it has ended."""
    try:
        return {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:
        return set()


async def validate(directory: Path, parts: ModuleConfig) -> tuple[int, str, set[str]]:
    """Exit code and output of `--mode validate`, and names of all threads that were seen meanwhile."""
    file = directory / "bootstrap.json"
    file.write_text(json.dumps(bootstrap([], parts)))
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(file), "-l", "info"]
    with (directory / "validate.log").open("w+b") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
        ended = asyncio.create_task(process.wait())
        seen: set[str] = set()
        # No event tells of a thread's beginning.
        while not ended.done():
            seen |= threads_of(process.pid)
            await asyncio.wait([ended], timeout=0.001)
        log.seek(0)
        return await ended, log.read().decode(), seen


async def test_a_configuration_can_be_checked_without_side_effects(tmp_path: Path, pair: PemFiles) -> None:
    tls = {"tls": "optional", "cert": str(pair.cert), "key": str(pair.key)}
    good = ModuleConfig(client=tls, node={"tls": "preferred"})
    code, output, seen = await validate(tmp_path, good)
    assert code == 0, output
    assert "tidevoy-files" not in seen
    code, output, _ = await validate(tmp_path, ModuleConfig(session={"speed": 9}))
    assert code != 0
    assert "unknown field `speed`" in output


async def test_files_are_watched_while_envoy_runs(tmp_path: Path, pair: PemFiles) -> None:
    """What the test above would not see: that the thread has this name."""
    tls = {"tls": "optional", "cert": str(pair.cert), "key": str(pair.key)}
    async with run_envoy(
        tmp_path, ["127.0.0.1:1"], ModuleConfig(client=tls, node={"tls": "preferred"})
    ) as proxy:
        assert proxy.thread_names().count("tidevoy-files") == 2
