"""`tidevoy bench against`: this build of the module against another one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import failures
from bench.proxies.command import prepared
from bench.proxies.comparison import Comparison, column_titles, compare, estimate, table_row
from bench.proxies.contenders import Build, Contender, built, envoy_with
from bench.proxies.revision_build import revision
from bench.proxies.significance import Verdict, overall
from bench.proxies.workloads import Encryption, Workload, chosen
from cli.output import elapsed, remark, say, show_json, show_table

_BLOCKS = 120  # two contenders leave time for more blocks than three
_THIS, _OTHER = "this build", "the other build"
EXIT_CODES = {Verdict.BETTER: 0, Verdict.EQUAL: 0, Verdict.WORSE: 1, Verdict.UNCLEAR: 3}


def command(
    rev: Annotated[
        str | None,
        typer.Option(
            help="The other build is that of this git revision, with its control plane.", show_default=False
        ),
    ] = None,
    module: Annotated[
        Path | None,
        typer.Option(
            help="The other build is this file, with the control plane of this checkout.",
            exists=True,
            dir_okay=False,
            resolve_path=True,
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only workloads with this in their name.", show_default=False)
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare this checkout's module with another build, before MariaDB. About 7 minutes.

    Exit code 0: equal or better in everything; 1: worse in something; 3: unclear in something, but not worse.
    """
    if (module is None) == (rev is None):
        raise typer.BadParameter("name the other build: either --rev REVISION or --module FILE")
    workloads = chosen(only or [], whole=False)
    with failures("against"):
        found = asyncio.run(_measure(module, rev, workloads))
    verdict = overall(each.verdict for each in found)
    if print_json:
        show_json({"verdict": str(verdict), "comparisons": [each.as_json() for each in found]})
    else:
        show_table(column_titles(_OTHER), [table_row(each) for each in found])
        say(f"This build is {_SENTENCES[verdict]}.")
    raise typer.Exit(EXIT_CODES[verdict])


_SENTENCES = {
    Verdict.BETTER: "better in something, and equal in everything else",
    Verdict.EQUAL: "equal in everything",
    Verdict.WORSE: "worse in something",
    Verdict.UNCLEAR: "not worse as far as can be seen, but some comparisons are unclear",
}


async def _measure(module: Path | None, rev: str | None, workloads: Sequence[Workload]) -> list[Comparison]:
    ours = Build(built())
    async with _other(module, rev) as other, prepared() as bench:
        contenders = [_contender(_OTHER, other), _contender(_THIS, ours)]
        remark(f"{len(workloads)} workloads: about {elapsed(estimate(workloads, len(contenders), _BLOCKS))}")
        return await compare(contenders, workloads, bench.site, bench.client, bench.pinning, blocks=_BLOCKS)


def _contender(name: str, build: Build) -> Contender:
    return Contender(name, "", envoy_with(build), tuple(Encryption))


@asynccontextmanager
async def _other(module: Path | None, rev: str | None) -> AsyncIterator[Build]:
    if module is not None:
        yield Build(module)
        return
    assert rev is not None
    with tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as made:
        yield await revision(rev, Path(made))
