from pathlib import Path

import pytest

from bench.comparison import as_table, cells, samples, show, spread
from bench.sysbench import Outcome
from bench.targets import Target, quotients
from bench.workloads import Stage, Workload


class Nobody:
    async def run(self, port: int, seconds: float) -> Outcome:
        raise AssertionError("no clients in this test")


def workload(*targets: Target) -> Workload:
    return Workload("some load", "How it is done.", 16, lambda clients: Nobody(), Stage(2), targets)


MEASURED = {
    "direct": {"qps": [120.0, 110.0, 100.0]},
    "HAProxy": {"qps": [100.0, 100.0, 80.0], "cpu_us": [10.0, 20.0, 40.0], "system_calls": [6.0]},
    "again": {"qps": [100.0, 98.0, 80.0], "cpu_us": [10.0, 21.0, 39.0], "system_calls": [6.0]},
    "Tidevoy": {"qps": [90.0, 90.0, 90.0], "cpu_us": [11.0, 18.0, 30.0], "system_calls": [3.0]},
}


def test_runs_become_figures_round_by_round_without_those_that_one_lacks() -> None:
    runs = [{"cpu_us": 1.0, "user_us": 0.5, "qps": 9.0}, {"cpu_us": 2.0, "qps": 8.0}]
    assert samples(runs) == {"qps": [9.0, 8.0], "cpu_us": [1.0, 2.0]}
    assert samples([]) == {}


def test_only_runs_of_the_same_round_are_compared() -> None:
    found = quotients(MEASURED["Tidevoy"], MEASURED["HAProxy"])
    assert found["cpu_us"] == pytest.approx([1.1, 0.9, 0.75])
    assert found["system_calls"] == [0.5]
    assert spread(found["cpu_us"]) == pytest.approx({"median": 0.9, "min": 0.75, "max": 1.1})


def test_what_is_not_there_or_nothing_is_not_compared() -> None:
    assert quotients(MEASURED["direct"], {"cpu_us": [1.0]}) == {}
    assert quotients({"user_us": [1.0, 1.0]}, {"user_us": [0.0, 1.0]}) == {}


def test_a_table_says_what_was_measured() -> None:
    table = as_table(
        workload(Target("Tidevoy", "cpu_us", 1.0)),
        MEASURED,
        dict.fromkeys(MEASURED, "1.2.3"),
        rounds=3,
        seconds=6.0,
        condition={"at": "now"},
        reference="HAProxy",
        again="again",
    )
    peers = {peer.pop("name"): peer for peer in table.pop("peers")}
    assert [target["verdict"] for target in table.pop("targets")] == ["met"]
    assert table == {
        "workload": "some load",
        "method": "How it is done.",
        "workers": 2,
        "threads": 16,
        "rounds": 3,
        "seconds": 6.0,
        "reference": "HAProxy",
        "again": "again",
        "condition": {"at": "now"},
    }
    assert list(peers) == ["direct", "HAProxy", "again", "Tidevoy"]
    assert peers["direct"]["version"] == "1.2.3"
    assert peers["direct"]["figures"] == {"qps": {"median": 110.0, "min": 100.0, "max": 120.0}}
    assert set(peers["direct"]["ratios"]) == {"qps"}
    assert peers["HAProxy"]["ratios"]["cpu_us"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_a_table_is_shown_with_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    table = as_table(
        workload(Target("Tidevoy", "cpu_us", 1.0), Target("Tidevoy", "qps", 0.95, least=True)),
        MEASURED,
        dict.fromkeys(MEASURED, ""),
        rounds=3,
        seconds=6.0,
        condition={},
        reference="HAProxy",
        again="again",
    )
    assert cells(table["peers"][0])[:4] == ["direct", "110", "-", "-"]
    show(table)
    shown = capsys.readouterr().out
    assert "some load, 16 clients, 2 workers; 3 x 6 s" in shown
    assert "0.900 (0.750 to 1.100)" in shown
    assert "met: Tidevoy's CPU µs is 0.900 of HAProxy's" in shown
    assert "missed: Tidevoy's QPS is 0.900 of HAProxy's; at least 0.95" in shown


def test_the_load_of_a_workload_is_made_where_it_is_told(tmp_path: Path) -> None:
    assert isinstance(workload().load(tmp_path), Nobody)
