"""Builds of the module that are compared, each with the control plane that it belongs to."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import cargo
from bench.costs import Proxy
from bench.peers import Site, settings
from controlplane.errors import TidevoyError
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess
from sandbox.process import ProcessFailed, describe_exit, find_program
from sandbox.server import greets

_ROOT = Path(__file__).parents[1]
_TARGET = _ROOT / "filters" / "target" / "against"
"""Where other revisions are built: what they have in common is built once."""
_MODULE = "release/libtidevoy.so"
_PATIENCE = 30.0  # seconds until an Envoy serves
_POLL = 0.05
_COMMAND = "from api.cli.main import main; main()"


class RevisionUnusable(TidevoyError):
    """The revision cannot be had."""

    def __init__(self, revision: str, reason: str) -> None:
        super().__init__(f"cannot build the module of revision {revision}: {reason}")


@dataclass(frozen=True, slots=True)
class Build:
    """A module's file. `root`: the checkout whose control plane configures it; None: this one's does."""

    module: Path
    root: Path | None = None

    def environment(self) -> dict[str, str]:
        """For programs of its checkout."""
        return {} if self.root is None else {"PYTHONPATH": str(self.root)}


class _ControlPlaneOf(ControlPlane):
    build: Build

    def environment(self) -> Mapping[str, str]:
        """With the code of the build's checkout."""
        return {**super().environment(), **self.build.environment()}


def envoy_of(build: Build) -> Callable[[Site], AbstractAsyncContextManager[Proxy]]:
    """An Envoy with this build, as `bench.peers.envoy` starts one. ProcessFailed: it does not serve."""

    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        port = site.ports.take()
        control_plane = _ControlPlaneOf(site.directory, settings(site, port, with_module=True))
        control_plane.build = build
        async with control_plane:
            bootstrap = await asyncio.to_thread(_bootstrap, build, control_plane)
            async with EnvoyProcess(bootstrap, site.directory, concurrency=site.stage.workers) as process:
                try:
                    async with asyncio.timeout(_PATIENCE):
                        while not await greets(port):  # noqa: ASYNC110 - Envoy tells us nothing by itself
                            await asyncio.sleep(_POLL)
                except TimeoutError:
                    reason = (
                        f"with {build.module} did not serve within {_PATIENCE:.0f} s; a module of another"
                        " revision may want the control plane of that revision: name it with --rev"
                    )
                    raise ProcessFailed("Envoy", reason, process.complaint(process.process)) from None
                yield Proxy(port, process.process.pid)

    return start


def _bootstrap(build: Build, control_plane: ControlPlane) -> str:
    """As the command `tidevoy bootstrap` of its checkout prints it."""
    options = ["--config", str(control_plane.config_file), "--id", "measured", "--admin", "127.0.0.1:0"]
    command = [sys.executable, "-P", "-c", _COMMAND, "bootstrap", *options, "--module", str(build.module)]
    environment = dict(os.environ) | build.environment()
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    if said.returncode != 0:
        raise ProcessFailed("tidevoy bootstrap", describe_exit(said.returncode), said.stderr.strip())
    return said.stdout


@asynccontextmanager
async def revision(name: str, directory: Path) -> AsyncIterator[Build]:
    """The module of a git revision, with its control plane; minutes when much of it is new.

    RevisionUnusable, ProgramMissing without git or cargo, ProcessFailed: it does not build; TimeoutError.
    """
    root = directory / "checkout"
    await asyncio.to_thread(_extract, name, root)
    try:
        manifest = root / "filters" / "Cargo.toml"
        await cargo.build(manifest, _TARGET, directory, "--package", "module")
        # The next revision is built at the same place.
        module = root / "libtidevoy.so"
        shutil.copyfile(_TARGET / _MODULE, module)
        yield Build(module, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _extract(name: str, root: Path) -> None:
    """The files of a revision, and what is generated from them."""
    git = find_program("git", "git")
    if not re.fullmatch(r"[\w./~^@{}-]+", name) or name.startswith("-"):
        raise RevisionUnusable(name, "that is no name of a revision")
    archive = subprocess.run(
        [git, "-C", str(_ROOT), "archive", name], capture_output=True, timeout=60, check=False
    )
    if archive.returncode != 0:
        raise RevisionUnusable(name, archive.stderr.decode(errors="replace").strip())
    root.mkdir(parents=True)
    tar = find_program("tar", "tar")
    subprocess.run([tar, "-x", "-C", str(root)], input=archive.stdout, check=True, timeout=60)
    protos = [str(proto.relative_to(root)) for proto in sorted((root / "controlplane").rglob("*.proto"))]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", "--python_out=.", *protos]
    made = subprocess.run(protoc, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if made.returncode != 0:
        raise RevisionUnusable(name, made.stderr.strip())
