"""Runs one client's script against one address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.clients.client_builds import ROOT, Client
from tests.support.clients.server import DATABASE, MAIN, NUMBERS, OTHER, Account
from tests.support.clients.steps import STEPS, Outcome


@dataclass(frozen=True, slots=True)
class Size:
    """How much data a run moves. `rows`, `load_rows`: rows; `blob`: bytes; `long`: characters of a text."""

    rows: int
    blob: int
    long: int
    load_rows: int


FULL = Size(rows=NUMBERS, blob=20 << 20, long=70_000, load_rows=20_000)
SMALL = Size(rows=300, blob=3_000, long=300, load_rows=100)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under a name. `ca`: PEM file, then clients demand TLS and check it; None: plain."""

    name: str
    port: int
    ca: Path | None = None
    host: str = "127.0.0.1"
    user: Account = MAIN


class ClientFailed(Exception):
    """A client ended before it had told of each step, or took too long; the text has its last words."""


async def run(
    client: Client,
    target: Target,
    directory: Path,
    *,
    size: Size = FULL,
    steps: Sequence[str] = STEPS,
    timeout: float = 120.0,
    compress: bool = False,
) -> list[Outcome]:
    """Run the steps; what came out of each. The client is installed first, which may take minutes.

    `directory` is for files of ours. `timeout` in seconds, for the run alone. `compress`: the client turns on
    compression; those in neither COMPRESSING nor NEGOTIATING (workshop.py) ignore it.
    """
    command = client.command(client.kit.install())
    load_file = _load_file(directory, size.load_rows)
    environment = {
        "MATRIX_HOST": target.host,
        "MATRIX_PORT": str(target.port),
        "MATRIX_USER": target.user.user,
        "MATRIX_PASSWORD": target.user.password,
        "MATRIX_OTHER_USER": OTHER.user,
        "MATRIX_OTHER_PASSWORD": OTHER.password,
        "MATRIX_DATABASE": DATABASE,
        "MATRIX_CA": str(target.ca or ""),
        "MATRIX_ROWS": str(min(size.rows, client.most_rows)),
        "MATRIX_ROWS_PREPARED": str(min(size.rows, client.most_rows_prepared)),
        "MATRIX_BLOB": str(min(size.blob, client.most_blob)),
        "MATRIX_LONG": str(size.long),
        "MATRIX_LOAD_FILE": str(load_file),
        "MATRIX_LOAD_ROWS": str(size.load_rows),
        "MATRIX_STEPS": " ".join(steps),
        "MATRIX_COMPRESS": "1" if compress else "",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            said, complaints = await process.communicate()
    except TimeoutError:
        raise ClientFailed(f"{client.name} at {target.name} took more than {timeout:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    outcomes = [Outcome.parse(line) for line in said.decode().splitlines()]
    if process.returncode != 0 or [outcome.step for outcome in outcomes] != list(steps):
        told = f"told of {len(outcomes)} of {len(steps)} steps and ended with {process.returncode}"
        last = complaints.decode(errors="replace")[-3000:]
        raise ClientFailed(f"{client.name} at {target.name} {told}:\n{last}")
    return outcomes


def _load_file(directory: Path, rows: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "load.tsv"
    file.write_text("".join(f"{i}\tname {i}\n" for i in range(rows)))
    return file
