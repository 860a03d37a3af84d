from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import command
from bench.command import BALANCE, CONTROL_PLANE, MOVES, Benchmark, register, select_benchmarks
from bench.reporting.report import Findings


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


def test_selects_benchmarks_by_name_in_fixed_order() -> None:
    assert [benchmark.name for benchmark in select_benchmarks([])] == ["plan", "latency", "fleet", "loop"]
    assert [benchmark.name for benchmark in select_benchmarks(["fleet", "plan"])] == ["plan", "fleet"]
    with pytest.raises(typer.BadParameter, match="there is no benchmark 'speed'; choose from plan, latency"):
        select_benchmarks(["speed"])


@pytest.mark.parametrize("benchmark", [*CONTROL_PLANE, BALANCE, MOVES], ids=lambda benchmark: benchmark.name)
def test_each_benchmark_has_a_method_and_measure(benchmark: Benchmark) -> None:
    module = importlib.import_module(benchmark.module)
    assert isinstance(module.METHOD, str)
    options = {
        "moves": {"sessions", "moves", "rounds"},
        "balance": {"cases", "only", "minutes", "seed", "lifetime"},
    }
    assert set(inspect.signature(module.measure).parameters) == options.get(benchmark.name, set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["against"], "either --rev REVISION or --module FILE"),
        (["against", "--rev", "main", "--module", __file__], "either --rev REVISION or --module FILE"),
        (["against", "--rev", "main", "--only", "writes"], "there are: point select, 1 client;"),
        (["balance", "x"], "there is no case 'x'; choose from a, b, c"),
        (["proxies", "--only", "writes"], "--only selects no workload; there are: point select, 1 client;"),
        (["proxies", "--peer", "other=/bin/true"], "write NAME=COMMAND"),
        (["proxies", "--peer", "HAProxy=/bin/true {listen} {server}"], "two proxies have the name HAProxy"),
        (["proxies", "--peer", "x=/bin/true {listen} {pd}"], "with {pd} needs PD: add --backend tidb"),
        (["proxies", "--peer", "x=/no/proxy {listen} {server}"], "no program /no/proxy for peer x"),
    ],
)
def test_rejects_wrong_options_before_any_start(app: typer.Typer, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "2000"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--seed", "0"], {"seed": 0}),
        (["d", "--only", "ideal"], {"cases": ["d"], "only": ["ideal"]}),
    ],
)
def test_only_a_run_without_options_is_saved(
    app: typer.Typer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    options: dict[str, object],
) -> None:
    received: list[dict[str, object]] = []

    async def measure(**given: object) -> Findings:
        received.append(given)
        return Findings(())

    monkeypatch.setattr("bench.balance.benchmark.measure", measure)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    result = CliRunner().invoke(app, ["bench", "balance", *arguments])
    assert (result.exit_code, received) == (0, [options])
    assert bool(list(tmp_path.iterdir())) == (not options)
