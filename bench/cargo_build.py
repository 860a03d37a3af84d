"""Build the Rust programs that benchmarks need, on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox.child_process import ChildProcess, ProcessFailed, ProgramMissing, describe_exit, find_program

_BUILD_TIMEOUT_SECONDS = 1200.0


async def build(manifest: Path, target: Path, directory: Path, *arguments: str) -> None:
    """Build the package of a `Cargo.toml` into the folder `target`. The log is written to `directory`.

    Raises ProgramMissing without cargo, ProcessFailed if cargo fails, TimeoutError.
    """
    command = [_find_cargo(), "build", "--quiet", "--release", "--locked", *arguments]
    command += ["--manifest-path", str(manifest), "--target-dir", str(target)]
    cargo = ChildProcess.start("cargo", command, directory=directory)
    try:
        async with asyncio.timeout(_BUILD_TIMEOUT_SECONDS):
            code = await cargo.wait()
    finally:
        await cargo.kill()  # no effect if it has exited
    if code != 0:
        raise ProcessFailed("cargo", describe_exit(code), cargo.tail())


def _find_cargo() -> str:
    try:
        return find_program("cargo", "cargo")
    except ProgramMissing:
        # Where rustup installs it, in case the login shell has not added it to PATH yet.
        rustup_path = Path.home() / ".cargo/bin/cargo"
        if rustup_path.exists():
            return str(rustup_path)
        raise ProgramMissing("cargo", "rustup (rustup.rs), which installs Rust") from None
