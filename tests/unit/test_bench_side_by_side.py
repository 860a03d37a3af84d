import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import haproxy, side_by_side_command
from bench.comparison import FIGURES, as_table
from bench.costs import Proxy, Usage, counted, figures, per_connection
from bench.machine import Machine
from bench.peers import AGAIN, REFERENCE, TIDEVOY, Peer, PeerUnusable, Site, by_command, filled
from bench.side_by_side import METHOD, ROUNDS, SECONDS, Plan, document, sample
from bench.side_by_side_command import Wishes, planned, run_side_by_side, save
from bench.sysbench import Outcome
from bench.targets import Target
from bench.workloads import WORKLOADS, chosen

GUIDE = """\
global
    log 127.0.0.1:514 local2
    maxconn 4096
    nbthread 2
defaults
    log global
    retries 2
    timeout connect 2s
    timeout client 30000s
    timeout server 30000s
listen tidb-cluster
    bind 127.0.0.1:3390
    mode tcp
    balance leastconn
    server tidb-1 127.0.0.1:4001 check inter 2000 rise 2 fall 3
    server tidb-2 127.0.0.1:4002 check inter 2000 rise 2 fall 3
"""


def configured(connections: int = 0, tuning: haproxy.Tuning = haproxy.GUIDE) -> str:
    return haproxy.configuration(
        listen=3390, servers=[4001, 4002], log=514, workers=2, connections=connections, tuning=tuning
    )


def test_haproxy_is_configured_as_the_guide_says() -> None:
    assert configured() == GUIDE


def test_tuned_haproxy_differs_in_two_lines() -> None:
    tuned = configured(tuning=haproxy.TUNED).splitlines()
    assert [line.strip() for line in tuned if line not in GUIDE.splitlines()] == [
        "tune.bufsize 65536",
        "option splice-auto",
    ]


def test_tls_of_clients_ends_in_haproxy() -> None:
    text = haproxy.configuration(
        listen=3390, servers=[4001, 4002], log=514, workers=2, certificate=Path("/run/cert.pem")
    )
    assert text == GUIDE.replace("bind 127.0.0.1:3390", "bind 127.0.0.1:3390 ssl crt /run/cert.pem")


@pytest.mark.parametrize(("connections", "most"), [(3000, 4096), (3097, 4097), (5000, 6000)])
def test_haproxy_takes_as_many_connections_as_a_workload_opens(connections: int, most: int) -> None:
    assert f"    maxconn {most}\n" in configured(connections)


OUTCOME = Outcome(queries=1000, per_second=500.0, p95=1.5)


def test_costs_are_told_per_query() -> None:
    used = Usage(on_cpu=0.04, user=0.01, system=0.03, machine=0.2)
    found = figures(OUTCOME, used, 64.0)
    assert found == pytest.approx(
        {
            "qps": 500.0,
            "p95_ms": 1.5,
            "machine_us": 200.0,
            "cpu_us": 40.0,
            "resident_mib": 64.0,
            "user_us": 10.0,
            "system_us": 30.0,
        }
    )
    assert {*found, "system_calls", "connection_kb", "kept"} == {name for name, _, _ in FIGURES}


def test_without_a_proxy_there_is_only_what_clients_and_the_machine_have() -> None:
    assert set(figures(OUTCOME, Usage(0.0, 0.0, 0.0, 0.2), None)) == {"qps", "p95_ms", "machine_us"}


def test_without_a_tick_user_and_system_time_are_not_told_apart() -> None:
    found = figures(OUTCOME, Usage(0.004, 0.0, 0.0, 0.2), 1.0)
    assert found["cpu_us"] == pytest.approx(4.0)
    assert "user_us" not in found


def test_usage_is_what_was_used_in_between() -> None:
    assert Usage(5.0, 3.0, 2.0, 9.0).since(Usage(4.0, 2.5, 1.5, 7.0)) == Usage(1.0, 0.5, 0.5, 2.0)


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("797,,raw_syscalls:sys_enter,16669819,100.00,,\n", 797),
        ("Events enabled\n12,,raw_syscalls:sys_enter,1,100.00,,\n", 12),
        ("<not counted>,,raw_syscalls:sys_enter,0,100.00,,\n", None),
        ("Error:\nNo permission to enable raw_syscalls:sys_enter event.\n", None),
        ("", None),
    ],
)
def test_what_perf_counted_is_read(output: str, count: int | None) -> None:
    assert counted(output) == count


def test_a_peers_command_gets_addresses_and_keeps_other_braces() -> None:
    words = ["x", "--on={listen}", "{servers}", "-w", "{workers}", '{"a": {}}']
    assert filled(words, 6000, [4001, 4002], 2) == [
        *("x", "--on=127.0.0.1:6000", "127.0.0.1:4001,127.0.0.1:4002", "-w", "2"),
        '{"a": {}}',
    ]


def test_a_peer_has_the_name_that_it_is_given() -> None:
    assert by_command("other = cat {listen} {servers}").name == "other"


@pytest.mark.parametrize(
    "text",
    [
        *("", "other", "=cat {listen} {servers}", "a=cat {listen}", "a=cat {servers}"),
        *("a='{listen} {servers}", "a=no-such-program {listen} {servers}"),
    ],
)
def test_a_peer_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(PeerUnusable):
        by_command(text)


def test_workloads_are_chosen_by_a_part_of_their_name_and_by_workers() -> None:
    assert chosen([], []) == list(WORKLOADS)
    assert {workload.name for workload in chosen(["Select, text"], [])} == {"point select, text"}
    assert {workload.stage.workers for workload in chosen([], [2])} == {2}
    assert chosen(["no such"], []) == []


def test_each_stage_is_set_up_once_and_each_table_is_there_once() -> None:
    stages = [workload.stage for workload in chosen([], [])]
    changes = sum(one != other for one, other in pairwise(stages))
    assert changes + 1 == len(set(stages))
    titles = [workload.title for workload in WORKLOADS]
    assert len(set(titles)) == len(titles)


def test_tidevoy_is_to_cost_no_more_than_haproxy() -> None:
    judged = {(w.name, w.threads) for w in WORKLOADS if w.targets}
    assert judged >= {("point select, text", threads) for threads in (4, 16, 64)}
    cheap = {w.name for w in WORKLOADS if Target(TIDEVOY, "cpu_us", 1.00) in w.targets}
    assert cheap == {
        "point select, text",
        "point select, fixed rate",
        *(f"result of {rows} rows" for rows in ("10", "100", "1,000", "10,000")),
    }


def test_idle_and_new_connections_are_to_cost_the_load_little() -> None:
    targets = {w.name: set(w.targets) for w in WORKLOADS}
    assert targets["point select beside 5,000 idle connections"] == {
        Target(TIDEVOY, "connection_kb", 25, alone=True),
        Target(TIDEVOY, "kept", 0.98, least=True, alone=True),
    }
    assert targets["point select beside 300 new connections/s"] == {Target(TIDEVOY, "qps", 0.97, least=True)}
    compared = [w for w in WORKLOADS if w.without(Path()) is not None]
    assert {w.name for w in compared} == {w.name for w in WORKLOADS if "beside" in w.name}


@pytest.mark.parametrize(
    ("before", "after", "connections", "found"),
    [(4_000.0, 24_000.0, 5_000, {"connection_kb": [4.0]}), (0.0, 0.0, 5_000, {}), (9.0, 9.5, 0, {})],
)
def test_memory_is_told_per_connection(
    before: float, after: float, connections: int, found: dict[str, list[float]]
) -> None:
    assert per_connection(before, after, connections) == found


@pytest.mark.parametrize(("number", "order"), [(0, ["alone", "run"]), (1, ["run", "alone"])])
async def test_the_run_without_company_comes_first_in_every_other_round(
    number: int, order: list[str]
) -> None:
    done = []

    async def run() -> dict[str, float]:
        done.append("run")
        return {"qps": 900.0}

    async def alone() -> float:
        done.append("alone")
        return 1000.0

    assert await sample(number, run, alone) == {"qps": 900.0, "kept": 0.9}
    assert done == order
    assert await sample(number, run, None) == {"qps": 900.0}


def test_a_run_is_kept_by_itself_when_nothing_of_it_is_reduced() -> None:
    assert Plan(WORKLOADS, []).whole
    assert Plan(WORKLOADS, [], rounds=ROUNDS + 1, seconds=SECONDS * 2).whole
    assert not Plan(WORKLOADS[1:], []).whole
    assert not Plan(WORKLOADS, [], rounds=ROUNDS - 1).whole
    assert not Plan(WORKLOADS, [], seconds=1.0).whole


def nothing(site: Site) -> AbstractAsyncContextManager[Proxy]:
    raise AssertionError("nothing is started in this test")


OURS = [Peer(name, "", nothing) for name in (REFERENCE, AGAIN, TIDEVOY)]


def test_the_wishes_make_a_plan() -> None:
    plan = planned(Wishes(2, 3, ("10,000",), ("other=cat {listen} {servers}",), "1, 2"), OURS)
    assert [workload.name for workload in plan.workloads] == ["result of 10,000 rows"]
    assert (plan.rounds, plan.seconds, plan.warm_up) == (3, 2.0, 2.0)
    assert [peer.name for peer in plan.peers] == [REFERENCE, AGAIN, TIDEVOY, "other"]
    assert plan.estimate() > 4 * 3 * 2.0


@pytest.mark.parametrize(
    ("wishes", "problem"),
    [
        (Wishes(only=("nothing",)), "leave no workload; there are: point select, text"),
        (Wishes(workers="one"), "no list of numbers"),
        (Wishes(peers=("HAProxy=cat {listen} {servers}",)), "two peers with the name HAProxy"),
        (Wishes(peers=("x",)), "write NAME=COMMAND"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled_is_told(wishes: Wishes, problem: str) -> None:
    with pytest.raises(typer.BadParameter, match=problem):
        planned(wishes, OURS)


def test_the_document_is_replaced_as_a_whole(tmp_path: Path) -> None:
    machine = Machine("a CPU", 2, 1024, "Linux 6.1", "3.11.7", "1.40.0", "3.4.23")
    for tables in ([{"workload": "one"}], [{"workload": "one"}, {"workload": "two"}]):
        save(document(machine, tables), tmp_path / "results")
    kept = tmp_path / "results" / "side-by-side.json"
    assert json.loads(kept.read_text()) == {
        "suite": "side-by-side",
        "method": METHOD,
        "machine": machine.as_json(),
        "tables": [{"workload": "one"}, {"workload": "two"}],
    }
    assert list(kept.parent.iterdir()) == [kept]


def table_of(plan: Plan) -> dict[str, Any]:
    figures = {"qps": [100.0], "cpu_us": [10.0]}
    return as_table(
        plan.workloads[0],
        {peer.name: figures for peer in plan.peers},
        {peer.name: peer.version for peer in plan.peers},
        rounds=plan.rounds,
        seconds=plan.seconds,
        condition={"at": "2026-01-01 00:00:00Z", "load_average": 0.5, "others_busy": 0.02},
        reference=REFERENCE,
        again=AGAIN,
    )


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that is interrupted behind its first table."""

    async def measure(plan: Plan, ended: Callable[[dict[str, Any]], None]) -> None:
        ended(table_of(plan))
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side_command, "measure", measure)
    monkeypatch.setattr("bench.peers.ours", lambda: OURS)


@pytest.mark.parametrize(
    ("rounds", "elsewhere", "kept"), [(None, False, True), (1, False, False), (1, True, True)]
)
@pytest.mark.usefixtures("interrupted")
def test_what_was_measured_before_an_interruption_is_kept(
    rounds: int | None, elsewhere: bool, kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, given = tmp_path / "usual", tmp_path / "given"
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(Wishes(rounds=rounds), given if elsewhere else None, usual, quiet=False)
    shown = capsys.readouterr()
    assert "point select, text, 4 clients, 1 worker" in shown.out
    assert f"{len(WORKLOADS)} tables with 3 peers each: about " in shown.err
    written = (given if elsewhere else usual) / "side-by-side.json"
    assert written.exists() == kept
    if kept:
        assert [table["workload"] for table in json.loads(written.read_text())["tables"]] == [
            "point select, text"
        ]
