"""Other builds of Tidevoy next to this one: builds a revision, and runs its control plane."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.programs import build_with_cargo
from controlplane.errors import TidevoyError
from sandbox.child_process import ProcessFailed, describe_exit, find_program
from sandbox.control_plane import ControlPlaneProcess, tidevoy_command

_ROOT = Path(__file__).parents[1]
TARGET_DIRECTORY = _ROOT / "filters" / "target" / "against"
"""Shared build directory of other revisions, so that common dependencies are built once."""
_BUILT_MODULE = "release/libtidevoy.so"
_MODULE = "libtidevoy.so"  # in the checkout


class RevisionNotBuildable(TidevoyError):
    """The revision cannot be built."""

    def __init__(self, revision: str, reason: str) -> None:
        super().__init__(f"cannot build the module of revision {revision}: {reason}")


@dataclass(frozen=True, slots=True)
class ModuleBuild:
    """A module, and the checkout whose control plane it needs.

    `module`: the file, or None for Envoy without a module; `checkout`: None means this checkout.
    """

    module: Path | None
    checkout: Path | None = None

    @classmethod
    def of_checkout(cls, root: Path) -> ModuleBuild:
        """Return the build of a checkout in which `build_revision` has finished or not."""
        return cls(root / _MODULE, root)

    @property
    def is_complete(self) -> bool:
        """Whether the module exists, which `build_revision` writes last."""
        return self.module is not None and self.module.is_file()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which `tidevoy_command` runs the code of this build."""
        return {**inherited, **({} if self.checkout is None else {"PYTHONPATH": str(self.checkout)})}


class ControlPlaneOfBuild(ControlPlaneProcess):
    """A control plane whose code is that of `build`, which may change between two starts."""

    build = ModuleBuild(None)

    def environment(self) -> Mapping[str, str]:
        return self.build.environment(super().environment())


def render_bootstrap(build: ModuleBuild, config: Path, *options: str) -> str:
    """Return the output of `tidevoy bootstrap` of a build, with the build's module. Raises ProcessFailed."""
    command = [*tidevoy_command(), "bootstrap", "--config", str(config), *options]
    command += [] if build.module is None else ["--module", str(build.module)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    result = subprocess.run(
        command, capture_output=True, text=True, env=build.environment(inherited), timeout=60, check=False
    )
    if result.returncode != 0:
        raise ProcessFailed("tidevoy bootstrap", describe_exit(result.returncode), result.stderr.strip())
    return result.stdout


async def build_revision(name: str, directory: Path, target: Path = TARGET_DIRECTORY) -> ModuleBuild:
    """Build the module of a git revision and extract its control plane to `directory`; may take minutes.

    Raises RevisionNotBuildable, ProgramMissing without git or cargo, ProcessFailed if the build fails, and
    TimeoutError.
    """
    root = directory / "checkout"
    await asyncio.to_thread(_extract_revision, name, root)
    await asyncio.to_thread(prepare_control_plane, name, root)
    return ModuleBuild(await build_module(root, target), root)


async def build_module(root: Path, target: Path) -> Path:
    """Build the module of the checkout in `root`, and return its path in this checkout.

    Raises ProgramMissing without cargo, ProcessFailed if the build fails, and TimeoutError.
    """
    await build_with_cargo(root / "filters" / "module" / "Cargo.toml", target, root.parent)
    # Copied, because the build of another revision overwrites the file. See also `is_complete`.
    new_file = shutil.copyfile(target / _BUILT_MODULE, root / f"{_MODULE}.new")
    return new_file.replace(root / _MODULE)


def _extract_revision(name: str, root: Path) -> None:
    git = find_program("git", "git")
    if not re.fullmatch(r"[\w./~^@{}-]+", name) or name.startswith("-"):
        raise RevisionNotBuildable(name, "the name is not a git revision")
    archive = subprocess.run(
        [git, "-C", str(_ROOT), "archive", name], capture_output=True, timeout=60, check=False
    )
    if archive.returncode != 0:
        raise RevisionNotBuildable(name, archive.stderr.decode(errors="replace").strip())
    root.mkdir(parents=True)
    tar = find_program("tar", "tar")
    # `-m`: the files get the current time. With the time of the commit, cargo would use crates of
    # another revision that was built in the same target directory, because they are newer.
    subprocess.run([tar, "-x", "-m", "-C", str(root)], input=archive.stdout, check=True, timeout=60)


def prepare_control_plane(name: str, root: Path) -> None:
    """Make the control plane of the checkout in `root` runnable. Raises RevisionNotBuildable for `name`."""
    protos = [str(proto.relative_to(root)) for proto in sorted((root / "controlplane").rglob("*.proto"))]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", "--python_out=.", *protos]
    protoc_result = subprocess.run(protoc, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if protoc_result.returncode != 0:
        raise RevisionNotBuildable(name, protoc_result.stderr.strip())
    # The control plane reads its version from the metadata of the installed package, which would be ours.
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    metadata = root / f"tidevoy-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tidevoy\nVersion: {version}\n")
