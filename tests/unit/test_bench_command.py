from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import typer

from bench.command import AGAINST, BENCHMARKS, MOVES, SIDE_BY_SIDE, check, chosen


def test_all_are_measured_but_those_that_take_long() -> None:
    names = [benchmark.name for benchmark in chosen([])]
    assert names == ["plan", "latency", "fleet", "loop", "module_cost"]
    assert [benchmark.name for benchmark in chosen([AGAINST, "plan"])] == ["plan", AGAINST]
    with pytest.raises(typer.BadParameter, match="there is no benchmark 'speed'; choose from plan, latency"):
        chosen(["speed"])


@pytest.mark.parametrize(
    "name", [benchmark.name for benchmark in BENCHMARKS if benchmark.name != SIDE_BY_SIDE]
)
def test_a_benchmark_takes_the_options_that_it_says(name: str) -> None:
    (benchmark,) = chosen([name])
    module = importlib.import_module(f"bench.{name}")
    assert isinstance(module.METHOD, str)
    assert set(benchmark.takes) == set(inspect.signature(module.measure).parameters)


@pytest.mark.parametrize(
    ("names", "given", "complaint"),
    [
        ([MOVES], {"seconds": 1}, "--seconds is for module_cost and against and side_by_side; name it"),
        ([], {"sessions": 100}, "--sessions is for moves; name it"),
        ([], {"rounds": 1}, "--rounds is for moves and against and side_by_side; name it"),
        (["plan"], {"only": ["x"]}, "--only is for side_by_side; name it"),
        ([AGAINST], {}, "against needs the other build: either --module PATH or --rev REV"),
        ([AGAINST], {"rev": "main", "module": "/m.so"}, "either --module PATH or --rev REV"),
    ],
)
def test_an_option_that_is_for_another_is_refused(
    names: list[str], given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(typer.BadParameter, match=complaint):
        check(chosen(names), given)


@pytest.mark.parametrize(
    ("names", "given"),
    [
        ([], {"seconds": 2}),
        ([MOVES], {"sessions": 100, "moves": 100, "rounds": 1}),
        ([AGAINST], {"rev": "HEAD~1", "rounds": 2, "seconds": 1}),
        ([SIDE_BY_SIDE], {"only": ["point"], "workers": "1"}),
    ],
)
def test_options_of_what_is_wanted_are_fine(names: list[str], given: dict[str, Any]) -> None:
    check(chosen(names), given)
