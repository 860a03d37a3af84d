"""Runs one client of the matrix against one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.clients.client_builds import ROOT, MatrixClient
from tests.support.clients.server import DATABASE, MAIN_ACCOUNT, NUMBERS_ROWS, OTHER_ACCOUNT, MatrixAccount
from tests.support.clients.steps import STEPS, StepResult


@dataclass(frozen=True, slots=True)
class DataSize:
    """Amount of data of a run: rows, bytes of a value, characters of a text, lines of a file."""

    rows: int
    blob_bytes: int
    long_characters: int
    load_rows: int


FULL_SIZE = DataSize(rows=NUMBERS_ROWS, blob_bytes=20 << 20, long_characters=70_000, load_rows=20_000)
SMALL_SIZE = DataSize(rows=300, blob_bytes=3_000, long_characters=300, load_rows=100)


@dataclass(frozen=True, slots=True)
class MatrixTarget:
    """A named server. With `ca` (a PEM file), clients require TLS and verify the server's certificate."""

    name: str
    port: int
    ca: Path | None = None
    host: str = "127.0.0.1"
    account: MatrixAccount = MAIN_ACCOUNT


class ClientFailed(Exception):
    """A client took too long, or failed before it reported all steps (the text has its last errors)."""


async def run_client(
    client: MatrixClient,
    target: MatrixTarget,
    directory: Path,
    *,
    size: DataSize = FULL_SIZE,
    steps: Sequence[str] = STEPS,
    timeout: float = 120.0,
    compress: bool = False,
) -> list[StepResult]:
    """Install the client, which may take minutes. Run the steps and return their results.

    `directory` is for temporary files. `timeout` limits the run, in seconds. With `compress`, the clients in
    ALWAYS_COMPRESSING and NEGOTIATED_COMPRESSING enable compression.
    """
    command = client.command(client.build.install())
    load_file = _write_load_file(directory, size.load_rows)
    environment = {
        "MATRIX_HOST": target.host,
        "MATRIX_PORT": str(target.port),
        "MATRIX_USER": target.account.user,
        "MATRIX_PASSWORD": target.account.password,
        "MATRIX_OTHER_USER": OTHER_ACCOUNT.user,
        "MATRIX_OTHER_PASSWORD": OTHER_ACCOUNT.password,
        "MATRIX_DATABASE": DATABASE,
        "MATRIX_CA": str(target.ca or ""),
        "MATRIX_ROWS": str(min(size.rows, client.max_rows)),
        "MATRIX_ROWS_PREPARED": str(min(size.rows, client.max_prepared_rows)),
        "MATRIX_BLOB": str(min(size.blob_bytes, client.max_blob_bytes)),
        "MATRIX_LONG": str(size.long_characters),
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
            output, errors = await process.communicate()
    except TimeoutError:
        raise ClientFailed(f"{client.name} at {target.name} took more than {timeout:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    outcomes = [StepResult.parse(line) for line in output.decode().splitlines()]
    if process.returncode != 0 or [outcome.step for outcome in outcomes] != list(steps):
        summary = f"reported {len(outcomes)} of {len(steps)} steps and exited with {process.returncode}"
        last_errors = errors.decode(errors="replace")[-3000:]
        raise ClientFailed(f"{client.name} at {target.name} {summary}:\n{last_errors}")
    return outcomes


def _write_load_file(directory: Path, rows: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "load.tsv"
    file.write_text("".join(f"{i}\tname {i}\n" for i in range(rows)))
    return file
