"""`tidevoy bench against`: compare this build of the module with another build."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from bench.errors import convert_errors_to_benchmark_failed
from bench.programs import find_built_module
from bench.proxies.comparison import Comparison, compare, show_comparisons
from bench.proxies.contenders import Contender, envoy_starter
from bench.proxies.setup import prepare_setup
from bench.proxies.significance import RatioVerdict, overall_verdict
from bench.proxies.workloads import Encryption, OnlyOption, ProxyWorkload, select_workloads
from bench.revisions import ModuleBuild, build_revision
from cli.output import print_result, show_json

_BLOCKS = 120  # more than in `interleaving`, since there are only two contenders
_THIS_BUILD, _OTHER_BUILD = "this build", "the other build"
EXIT_CODES = {RatioVerdict.BETTER: 0, RatioVerdict.EQUAL: 0, RatioVerdict.WORSE: 1, RatioVerdict.UNCLEAR: 3}


def command(
    rev: Annotated[
        str | None,
        typer.Option(
            help="Compare with the module and control plane of this git revision.", show_default=False
        ),
    ] = None,
    module: Annotated[
        Path | None,
        typer.Option(
            help="Compare with this module file and the control plane of this checkout.",
            exists=True,
            dir_okay=False,
            resolve_path=True,
            show_default=False,
        ),
    ] = None,
    only: OnlyOption = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare this checkout's module with another build, in front of MariaDB. About 7 minutes.

    Exit code 0: equal or better in everything; 1: worse in something; 3: unclear in something, but not worse.
    """
    if (module is None) == (rev is None):
        raise typer.BadParameter("name the other build: either --rev REVISION or --module FILE")
    workloads = select_workloads(only or [], whole=False)
    with convert_errors_to_benchmark_failed("against"):
        comparisons = asyncio.run(_measure(module, rev, workloads))
    verdict = overall_verdict(comparison.verdict for comparison in comparisons)
    if print_json:
        data = TypeAdapter(list[Comparison]).dump_python(comparisons, mode="json")
        show_json({"verdict": str(verdict), "comparisons": data})
    else:
        show_comparisons(comparisons, _OTHER_BUILD)
        print_result(f"This build is {_SENTENCES[verdict]}.")
    raise typer.Exit(EXIT_CODES[verdict])


_SENTENCES = {
    RatioVerdict.BETTER: "better in something, and equal in everything else",
    RatioVerdict.EQUAL: "equal in everything",
    RatioVerdict.WORSE: "worse in something",
    RatioVerdict.UNCLEAR: "not worse in the clear comparisons, but some comparisons are unclear",
}


async def _measure(
    module: Path | None, rev: str | None, workloads: Sequence[ProxyWorkload]
) -> list[Comparison]:
    this_build = ModuleBuild(find_built_module())
    async with _open_other_build(module, rev) as other_build, prepare_setup() as bench:
        contenders = [_contender(_OTHER_BUILD, other_build), _contender(_THIS_BUILD, this_build)]
        return await compare(contenders, workloads, bench, blocks=_BLOCKS)


def _contender(name: str, build: ModuleBuild) -> Contender:
    return Contender(name, "", envoy_starter(build), tuple(Encryption))


@asynccontextmanager
async def _open_other_build(module: Path | None, rev: str | None) -> AsyncIterator[ModuleBuild]:
    if module is not None:
        yield ModuleBuild(module)
        return
    assert rev is not None
    with tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as directory:
        yield await build_revision(rev, Path(directory))
