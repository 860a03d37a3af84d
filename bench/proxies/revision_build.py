"""Build the module of a git revision, to compare it with this checkout's."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench import cargo_build
from bench.proxies.contenders import ModuleBuild
from controlplane.errors import TidevoyError
from sandbox.child_process import find_program

_ROOT = Path(__file__).parents[2]
_TARGET_DIRECTORY = _ROOT / "filters" / "target" / "against"
"""Shared build directory of other revisions, so that common dependencies are built once."""
_MODULE_PATH = "release/libtidevoy.so"


class RevisionNotBuildable(TidevoyError):
    """The revision cannot be built."""

    def __init__(self, revision: str, reason: str) -> None:
        super().__init__(f"cannot build the module of revision {revision}: {reason}")


async def build_revision(name: str, directory: Path) -> ModuleBuild:
    """Build the module of a git revision in `directory`, with its control plane; may take minutes.

    Raises RevisionNotBuildable, ProgramMissing without git or cargo, ProcessFailed if the build fails, and
    TimeoutError.
    """
    root = directory / "checkout"
    await asyncio.to_thread(_extract_checkout, name, root)
    await cargo_build.build(
        root / "filters" / "Cargo.toml", _TARGET_DIRECTORY, directory, "--package", "module"
    )
    # Copied, because the next revision is built in the same directory.
    module = root / "libtidevoy.so"
    shutil.copyfile(_TARGET_DIRECTORY / _MODULE_PATH, module)
    return ModuleBuild(module, root)


def _extract_checkout(name: str, root: Path) -> None:
    """Extract the files of a revision, and generate its protobuf code."""
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
    subprocess.run([tar, "-x", "-C", str(root)], input=archive.stdout, check=True, timeout=60)
    protos = [str(proto.relative_to(root)) for proto in sorted((root / "controlplane").rglob("*.proto"))]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", "--python_out=.", *protos]
    protoc_result = subprocess.run(protoc, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if protoc_result.returncode != 0:
        raise RevisionNotBuildable(name, protoc_result.stderr.strip())
