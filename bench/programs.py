"""Run programs to their end, and build the Rust programs that benchmarks need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from controlplane.xds.bootstrap import module_path
from sandbox.child_process import ChildProcess, ProcessFailed, ProgramMissing, describe_exit, find_program

_BUILD_TIMEOUT_SECONDS = 1200.0


async def run_program(name: str, command: Sequence[str], directory: Path, timeout: float) -> None:
    """Run a program with a log in `directory`. Raises ProcessFailed, and TimeoutError after `timeout`."""
    process = ChildProcess(name, command, directory=directory)
    try:
        async with asyncio.timeout(timeout):
            code = await process.wait()
    finally:
        await process.kill()  # no effect if the process has exited
    if code != 0:
        raise ProcessFailed(name, describe_exit(code), process.tail())


async def build_with_cargo(manifest: Path, target: Path, directory: Path, *arguments: str) -> None:
    """Build the package of a `Cargo.toml` into the folder `target`. The log is written to `directory`.

    Raises ProgramMissing without cargo, and the errors of `run_program`.
    """
    command = [_find_cargo(), "build", "--quiet", "--release", "--locked", *arguments]
    command += ["--manifest-path", str(manifest), "--target-dir", str(target)]
    await run_program("cargo", command, directory, _BUILD_TIMEOUT_SECONDS)


def find_built_module() -> Path:
    """Return the module of this checkout. Raises ProgramMissing if it is not built."""
    module = module_path.find_module()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    return module


def _find_cargo() -> str:
    try:
        return find_program("cargo", "cargo")
    except ProgramMissing:
        # rustup installs cargo here; the login shell may not have added it to PATH yet.
        rustup_path = Path.home() / ".cargo/bin/cargo"
        if rustup_path.exists():
            return str(rustup_path)
        raise ProgramMissing("cargo", "rustup (rustup.rs), which installs Rust") from None
