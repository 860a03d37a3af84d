"""`tidevoy bench capture`: what a capture of all traffic costs, in front of MariaDB or TiDB."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx2
import typer
from pydantic import TypeAdapter

from bench.errors import convert_errors_to_benchmark_failed
from bench.programs import find_built_module
from bench.proxies.comparison import Comparison, compare, show_comparisons
from bench.proxies.contenders import (
    Contender,
    ProxySite,
    RunningProxy,
    contender_from_command,
    envoy_starter,
)
from bench.proxies.setup import prepare_setup
from bench.proxies.steady_load import SteadyComparison, compare_at_cpu, show_steady_comparisons
from bench.proxies.workloads import OnlyOption, ProxyWorkload, select_workloads
from bench.revisions import ModuleBuild
from cli.output import show_json
from sandbox import tidb_binaries
from sandbox.child_process import ProcessFailed
from sandbox.tidb_binaries import TidbBinaries

_BLOCKS = 120
_OFF = "no capture"
_WORKLOADS = (
    *("point select, 16 clients", "point select, 64 clients"),
    *("point select, 4,000/s", "read and write, 2,000/s"),
)
_STEADY_WORKLOADS = ("point select, 16 clients", "read and write, 2,000/s")  # `--at-cpu` sets other rates
_CAPTURE_SECONDS = 3600


def command(
    only: OnlyOption = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME=COMMAND",
            help="Also compare a command that captures, as in `tidevoy bench proxies`.",
        ),
    ] = None,
    tidb_bin: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with tidb-server and pd-server: compare in front of TiDB instead of MariaDB.",
        ),
    ] = None,
    at_cpu: Annotated[
        int | None,
        typer.Option(
            min=10,
            max=95,
            metavar="PERCENT",
            help="Compare queries per second instead, at the rate that keeps this much of the CPU busy.",
        ),
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare an Envoy that captures all traffic with one that does not.

    It takes about 4 minutes, with --at-cpu about 5 and for each peer 2 more.
    """
    with convert_errors_to_benchmark_failed("capture"):
        names = only or (_WORKLOADS if at_cpu is None else _STEADY_WORKLOADS)
        workloads = select_workloads(names, whole=True)
        binaries = None if tidb_bin is None else tidb_binaries.require_binaries(tidb_bin, None)
        contenders = [*_contenders(), *[contender_from_command(peer) for peer in peers or ()]]
        if at_cpu is None:
            costs = asyncio.run(_measure_costs(contenders, workloads, binaries))
            values = TypeAdapter(list[Comparison]).dump_python(costs, mode="json")
            show = partial(show_comparisons, costs, _OFF)
        else:
            seconds = asyncio.run(_measure_seconds(contenders, workloads, binaries, at_cpu / 100))
            values = TypeAdapter(list[SteadyComparison]).dump_python(seconds, mode="json")
            show = partial(show_steady_comparisons, seconds)
    if print_json:
        show_json({"comparisons": values})
        return
    show()


def _contenders() -> list[Contender]:
    build = ModuleBuild(find_built_module())
    return [Contender(_OFF, "", envoy_starter(build)), Contender("capture", "", _capturing(build))]


async def _measure_costs(
    contenders: Sequence[Contender], workloads: Sequence[ProxyWorkload], binaries: TidbBinaries | None
) -> list[Comparison]:
    async with prepare_setup(binaries) as bench:
        return await compare(contenders, workloads, bench, blocks=_BLOCKS)


async def _measure_seconds(
    contenders: Sequence[Contender],
    workloads: Sequence[ProxyWorkload],
    binaries: TidbBinaries | None,
    cpu: float,
) -> list[SteadyComparison]:
    async with prepare_setup(binaries) as bench:
        return await compare_at_cpu(contenders, workloads, bench, cpu=cpu)


def _capturing(build: ModuleBuild) -> Callable[[ProxySite], AbstractAsyncContextManager[RunningProxy]]:
    """Return a function that starts Envoy and a control plane, and then a capture."""

    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        settings = {"capture": {"directory": str(site.directory / "captures")}}
        async with (
            envoy_starter(build, settings)(site) as proxy,
            httpx2.AsyncClient(base_url=proxy.api, trust_env=False) as api,
        ):
            answer = await api.post("/v1/traffic/capture", json={"duration_seconds": _CAPTURE_SECONDS})
            answer.raise_for_status()
            yield proxy
            await _check_complete(api)

    return start


async def _check_complete(api: httpx2.AsyncClient) -> None:
    """Raise ProcessFailed if records are missing: a capture that loses them would look cheap."""
    envoys = (await api.get("/v1/traffic/capture")).json()["envoys"]
    if not envoys or not all(envoy["active"] and envoy["dropped"] == 0 for envoy in envoys):
        raise ProcessFailed(
            "the capture", "has ended or has lost records; use a faster disk", json.dumps(envoys)
        )
