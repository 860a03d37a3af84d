"""Runs the matrix manually, without a proxy: `python -m tests.support.clients.matrix --help`.

Prints tables of clients and steps for MariaDB and for a simulated TiDB server, each without and with TLS. The
exit code is 1 if a step failed, or if a client violated the protocol at the simulated server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox.etcd import Etcd
from sandbox.ports import Ports
from sandbox.tidb import FakeTidb
from tests.support.clients.client_builds import CLIENTS, MatrixClient
from tests.support.clients.runner import (
    FULL_SIZE,
    SMALL_SIZE,
    ClientFailed,
    DataSize,
    MatrixTarget,
    run_client,
)
from tests.support.clients.server import MatrixMariaDb
from tests.support.clients.steps import STEPS, StepResult


def format_table(title: str, results: dict[str, list[StepResult]], steps: Sequence[str]) -> str:
    """Format steps as rows and clients as columns, followed by the failures and their reasons."""
    names = [name.removeprefix("connector-").replace("python", "conn") for name in results]
    widths = [max(len(name), 6) + 2 for name in names]

    def row(head: str, cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return (head.ljust(16) + "".join(padded)).rstrip()

    lines = [title, row("", names)]
    for index, step in enumerate(steps):
        lines.append(row(step, [outcomes[index].label for outcomes in results.values()]))
    seconds = [sum(outcome.seconds for outcome in outcomes) for outcomes in results.values()]
    lines.append(row("seconds", [f"{spent:.1f}" for spent in seconds]))
    for name, outcomes in results.items():
        lines += [f"  {name}, {o.step}: {o.label}: {o.detail}" for o in outcomes if o.is_ok is False]
    return "\n".join(lines)


async def run_clients(
    clients: Sequence[MatrixClient],
    target: MatrixTarget,
    directory: Path,
    size: DataSize,
    steps: Sequence[str],
) -> dict[str, list[StepResult]]:
    """Run the clients one after the other. A client that aborts counts as failed in all steps."""
    results = {}
    for client in clients:
        try:
            results[client.name] = await run_client(client, target, directory, size=size, steps=steps)
        except ClientFailed as failure:
            print(failure, file=sys.stderr)
            results[client.name] = [StepResult(step, False, "see above", 0.0) for step in steps]
    return results


async def _main(arguments: argparse.Namespace) -> int:
    clients = [client for client in CLIENTS if not arguments.client or client.name in arguments.client]
    steps = [step for step in STEPS if not arguments.step or step in arguments.step]
    size = SMALL_SIZE if arguments.small else FULL_SIZE
    failed = False
    with tempfile.TemporaryDirectory(prefix="tidevoy-matrix-") as name, Ports() as ports:
        directory = Path(name)
        async with (
            MatrixMariaDb.start(directory / "mariadb") as mariadb,
            Etcd.start(directory / "etcd") as etcd,
            FakeTidb(
                directory,
                ports.allocate(),
                ports.allocate(),
                name="tidb-1",
                pd=[etcd.url],
                mariadb=mariadb.address,
                arguments=mariadb.certificates.arguments(),
            ) as tidb,
        ):
            mariadb.fill()
            ca = mariadb.certificates.ca
            targets = [
                MatrixTarget("MariaDB, plain", mariadb.port),
                MatrixTarget("MariaDB, TLS", mariadb.port, ca),
                MatrixTarget("simulated TiDB, plain", tidb.port),
                MatrixTarget("simulated TiDB, TLS", tidb.port, ca),
            ]
            for target in targets:
                if arguments.target and not any(word in target.name for word in arguments.target):
                    continue
                started_at = time.monotonic()
                results = await run_clients(clients, target, directory / "run", size, steps)
                print(format_table(target.name, results, steps))
                if arguments.details:
                    for name, outcomes in results.items():
                        for o in outcomes:
                            print(f"  {name:24}{o.step:16}{o.label:8}{o.seconds:6.1f} s  {o.detail}")
                print(f"  in {time.monotonic() - started_at:.0f} s\n", flush=True)
                failed |= any(outcome.is_ok is False for outcomes in results.values() for outcome in outcomes)
            for line in tidb.violations():
                print(line)
                failed = True
    return int(failed)


def main() -> None:
    """Parse the command line and run the matrix."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--client", action="append", choices=[client.name for client in CLIENTS])
    parser.add_argument("--step", action="append", choices=STEPS)
    parser.add_argument("--target", action="append", help="part of a target's name")
    parser.add_argument("--small", action="store_true", help="use little data")
    parser.add_argument("--details", action="store_true", help="print each client's result of each step")
    sys.exit(asyncio.run(_main(parser.parse_args())))


if __name__ == "__main__":
    main()
