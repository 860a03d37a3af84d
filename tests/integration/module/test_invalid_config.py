"""Envoy rejects an invalid configuration at start, and its log says what to do."""

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

VERSION_MISMATCH = "the control plane is version 0.2.0, and this module 0.1.0: run an Envoy image of the"


@pytest.fixture
def certificates(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


INVALID_CONFIGS = {
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
    "an unknown value": (
        ModuleConfig(client={"tls": "maybe"}),
        'transport socket "client"',
        "unknown variant `maybe`",
    ),
    "another type": (
        ModuleConfig(live_settings={"login_timeout": "soon"}),
        'listener filter "live_config"',
        "invalid type",
    ),
    "another version": (ModuleConfig(version="0.2.0"), "", VERSION_MISMATCH),
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
    "no revocation list of clients": (
        ModuleConfig(
            client={
                "tls": "optional",
                "cert": "/etc/hostname",
                "key": "/etc/hostname",
                "client_ca": "/etc/hostname",
                "crl": "/no/clients.crl",
            }
        ),
        'transport socket "client"',
        "cannot read /no/clients.crl: No such file or directory",
    ),
    "no revocation list of nodes": (
        ModuleConfig(node={"tls": "required", "ca": "/etc/hostname", "verify": "ca", "crl": "/no/nodes.crl"}),
        'transport socket "node"',
        "cannot read /no/nodes.crl: No such file or directory",
    ),
    "no RSA key": (
        ModuleConfig(client={"rsa_key": "/no/rsa.pem"}),
        'transport socket "client"',
        "cannot read /no/rsa.pem",
    ),
}


@pytest.mark.parametrize(
    ("config", "component", "text"), INVALID_CONFIGS.values(), ids=INVALID_CONFIGS.keys()
)
async def test_invalid_configuration_is_rejected(
    tmp_path: Path, config: ModuleConfig, component: str, text: str
) -> None:
    with pytest.raises(ProcessFailed) as failure:
        async with run_envoy(tmp_path, ["127.0.0.1:1"], config):
            pass
    assert f"the configuration of the {component}" in failure.value.log
    assert text in failure.value.log


async def test_mismatched_certificate_and_key_are_rejected(tmp_path: Path, certificates: PemFiles) -> None:
    other = PemFiles.create(tmp_path / "other")
    config = ModuleConfig(client={"tls": "optional", "cert": str(certificates.cert), "key": str(other.key)})
    with pytest.raises(ProcessFailed, match="does not belong to the first certificate in"):
        async with run_envoy(tmp_path, ["127.0.0.1:1"], config):
            pass


async def test_missing_module_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"no-such\.so"):
        async with run_envoy(tmp_path, ["127.0.0.1:1"], ModuleConfig(module=Path("/no-such.so"))):
            pass


def threads_of(pid: int) -> set[str]:
    """Return the names of a process's threads, or nothing if it has ended."""
    try:
        return {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:
        return set()


async def validate(directory: Path, config: ModuleConfig) -> tuple[int, str, set[str]]:
    """Run `--mode validate`. Return its exit code, its output and the names of all threads observed."""
    file = directory / "bootstrap.json"
    file.write_text(json.dumps(bootstrap([], config)))
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(file), "-l", "info"]
    with (directory / "validate.log").open("w+b") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
        ended = asyncio.create_task(process.wait())
        thread_names: set[str] = set()
        # No event reports the start of a thread, so this loop polls.
        while not ended.done():
            thread_names |= threads_of(process.pid)
            await asyncio.wait([ended], timeout=0.001)
        log.seek(0)
        return await ended, log.read().decode(), thread_names


async def test_configuration_is_validated_without_side_effects(
    tmp_path: Path, certificates: PemFiles
) -> None:
    tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    valid = ModuleConfig(client=tls, node={"tls": "preferred"})
    code, output, thread_names = await validate(tmp_path, valid)
    assert code == 0, output
    assert "tidevoy-files" not in thread_names
    code, output, _ = await validate(tmp_path, ModuleConfig(session={"speed": 9}))
    assert code != 0
    assert "unknown field `speed`" in output


async def test_files_are_watched_while_envoy_runs(tmp_path: Path, certificates: PemFiles) -> None:
    """The previous test assumes that threads that watch files are named `tidevoy-files`."""
    tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    async with run_envoy(
        tmp_path, ["127.0.0.1:1"], ModuleConfig(client=tls, node={"tls": "preferred"})
    ) as proxy:
        assert proxy.thread_names().count("tidevoy-files") == 2
