"""`tidevoy bench statements`: what digests of statements and rules cost, in front of MariaDB."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from bench.errors import convert_errors_to_benchmark_failed
from bench.programs import find_built_module
from bench.proxies.comparison import Comparison, compare, show_comparisons
from bench.proxies.contenders import Contender, envoy_starter
from bench.proxies.setup import prepare_setup
from bench.proxies.workloads import ProxyWorkload, select_workloads
from bench.revisions import ModuleBuild
from cli.output import show_json

_BLOCKS = 120
_OFF, _FEW_RULES = "neither", "2 rules"
_WORKLOADS = ("point select, 16 clients", "point select, 64 clients")
_MANY = 2_000

# No statement of the benchmark fits one of these rules.
_RULES = [
    {"name": f"rule-{number}", "pattern": rf"from orders_{number} where note like '%{number}%'", "block": {}}
    for number in range(_MANY)
]
_REWRITE = {"name": "every-query", "pattern": "^select c from", "rewrite": {"replace": "select c as c from"}}
_OBSERVED: Mapping[str, Mapping[str, Any]] = {
    _OFF: {},
    "digests": {"digests": "on"},
    "a rewrite of every query": {"rules": [_REWRITE]},
}
_JUDGED: Mapping[str, Mapping[str, Any]] = {
    _FEW_RULES: {"rules": _RULES[:2]},
    f"{_MANY:,} rules": {"rules": _RULES},
}


def command(
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare digests, and a rewrite of every query, with neither; and 2,000 rules with 2.

    It takes about 4 minutes.
    """
    with convert_errors_to_benchmark_failed("statements"):
        comparisons = asyncio.run(_measure(select_workloads(_WORKLOADS, whole=False)))
    if print_json:
        show_json({"comparisons": TypeAdapter(list[Comparison]).dump_python(comparisons, mode="json")})
        return
    for reference in (_OFF, _FEW_RULES):
        show_comparisons([one for one in comparisons if one.reference == reference], reference)


async def _measure(workloads: Sequence[ProxyWorkload]) -> list[Comparison]:
    comparisons: list[Comparison] = []
    async with prepare_setup() as bench:
        for group in (_OBSERVED, _JUDGED):
            contenders = [_contender(name, settings) for name, settings in group.items()]
            comparisons += await compare(contenders, workloads, bench, blocks=_BLOCKS)
    return comparisons


def _contender(name: str, statements: Mapping[str, Any]) -> Contender:
    build = ModuleBuild(find_built_module())
    return Contender(name, "", envoy_starter(build, {"statements": statements}))
