"""What `tidevoy bench side_by_side` does with its options, and with the tables as they come."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from api.cli.output import elapsed, remark
from bench import peers, side_by_side_page
from bench.comparison import SUITE, show
from bench.machine import Machine
from bench.peers import Peer, PeerUnusable, by_command
from bench.side_by_side import ROUNDS, SECONDS, Plan, document, measure
from bench.workloads import WORKLOADS, chosen


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options as they were given; None or nothing: as it is by itself."""

    seconds: int | None = None
    rounds: int | None = None
    only: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    workers: str | None = None


def planned(wishes: Wishes, ours: Sequence[Peer]) -> Plan:
    """What these wishes come to, beside `ours`. BadParameter."""
    workloads = chosen(wishes.only, _numbers(wishes.workers))
    if not workloads:
        known = "; ".join(dict.fromkeys(workload.name for workload in WORKLOADS))
        raise typer.BadParameter(f"--only and --workers leave no workload; there are: {known}")
    try:
        all_peers = [*ours, *(by_command(text) for text in wishes.peers)]
    except PeerUnusable as problem:
        raise typer.BadParameter(str(problem)) from None
    names = [peer.name for peer in all_peers]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"there are two peers with the name {name}; give yours another")
    return Plan(workloads, all_peers, wishes.rounds or ROUNDS, float(wishes.seconds or SECONDS))


def _numbers(workers: str | None) -> list[int]:
    words = [word.strip() for word in workers.split(",")] if workers else []
    if not all(word.isdigit() for word in words):
        raise typer.BadParameter(f"--workers {workers} is no list of numbers; write for example 1,2")
    return [int(word) for word in words]


def run_side_by_side(wishes: Wishes, results: Path | None, usual: Path, *, quiet: bool) -> dict[str, Any]:
    """Measure, show each table unless `quiet`, and keep all so far after each; the document.

    A reduced run is kept only where `results` says. Interrupted, it leaves the tables that it has.
    """
    plan, machine = planned(wishes, peers.ours()), Machine.here()
    directory = results or (usual if plan.whole else None)
    tables: list[dict[str, Any]] = []

    def ended(table: dict[str, Any]) -> None:
        tables.append(table)
        if not quiet:
            show(table)
        if directory is not None:
            save(document(machine, tables), directory)

    extent = f"{len(plan.workloads)} tables with {len(plan.peers)} peers each"
    remark(f"{extent}: about {elapsed(plan.estimate())}")
    try:
        asyncio.run(measure(plan, ended))
    finally:
        if tables and directory is not None:
            for path in side_by_side_page.keep(document(machine, tables), directory):
                remark(f"wrote {path}")
    return document(machine, tables)


def save(kept: Mapping[str, Any], directory: Path) -> None:
    """Replace the document in `directory` as a whole, whenever we are stopped."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{SUITE}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, path)
