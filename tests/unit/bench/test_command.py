from __future__ import annotations

import importlib
import inspect

import pytest
import typer
from typer.testing import CliRunner

from bench.command import BALANCE, CONTROL_PLANE, MOVES, Benchmark, register, select_benchmarks


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.callback()(lambda: None)
    register(made)
    return made


def test_benchmarks_are_chosen_by_name_and_run_in_our_order() -> None:
    assert [each.name for each in select_benchmarks([])] == ["plan", "latency", "fleet", "loop"]
    assert [each.name for each in select_benchmarks(["fleet", "plan"])] == ["plan", "fleet"]
    with pytest.raises(typer.BadParameter, match="there is no benchmark 'speed'; choose from plan, latency"):
        select_benchmarks(["speed"])


@pytest.mark.parametrize("benchmark", [*CONTROL_PLANE, BALANCE, MOVES], ids=lambda each: each.name)
def test_a_benchmark_can_be_measured(benchmark: Benchmark) -> None:
    module = importlib.import_module(benchmark.module)
    assert isinstance(module.METHOD, str)
    options = {"sessions", "moves", "rounds"} if benchmark is MOVES else set()
    assert set(inspect.signature(module.measure).parameters) == options


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["against"], "either --rev REVISION or --module FILE"),
        (["against", "--rev", "main", "--module", __file__], "either --rev REVISION or --module FILE"),
        (["against", "--rev", "main", "--only", "writes"], "there are: point select, 1 client;"),
        (["proxies", "--only", "writes"], "--only leaves no workload; there are: point select, 1 client;"),
        (["proxies", "--peer", "other=/bin/true"], "write NAME=COMMAND"),
        (["proxies", "--peer", "HAProxy=/bin/true {listen} {server}"], "two proxies with the name HAProxy"),
        (["proxies", "--peer", "x=/bin/true {listen} {pd}"], "with {pd} needs PD: add --backend tidb"),
        (["proxies", "--peer", "x=/no/proxy {listen} {server}"], "no program /no/proxy for peer x"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    app: typer.Typer, arguments: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "2000"})
    assert result.exit_code == 2
    assert complaint in result.output
