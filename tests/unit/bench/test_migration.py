from __future__ import annotations

import asyncio
import json
import os
import time

import pytest

from bench.machine import ResourceUsage, count_epoll_entries
from bench.migration import event_loop_latency
from bench.migration.benchmark import fit_session_count
from bench.migration.fake_node import NodeSession, SharedNodeState, make_signer
from bench.migration.figures import (
    IdleSessionsResult,
    ObservedPhase,
    RepeatedMigrationsResult,
    idle_sessions_figures,
    repeated_migrations_figures,
    rolling_figures,
)
from bench.migration.rolling_restart import (
    ALL_COMBINATIONS,
    Combination,
    RollingRestartResult,
    parse_migration_counts,
)
from bench.migration.stopwatch import (
    TimedStatement,
    TimeWindow,
    latencies_ms,
    slowest_ms,
    statements_during,
)
from bench.reporting.report import BenchmarkFigure
from bench.sysbench import SysbenchCounts, SysbenchLoad
from sandbox.tidb_sim.packets import MySqlCommand, frame
from sandbox.tidb_sim.session_token import issue_token, verify_token

SYSBENCH = """\
[ 1s ] thds: 32 tps: 30.00 qps: 600.00 (r/w/o: 420/120/60) lat (ms,95%): 5.00 err/s: 0.00 reconn/s: 0.00
SQL statistics:
    queries performed:
        read:                            67564
        total:                           96520
    transactions:                        4826   (160.79 per sec.)
    queries:                             96520  (3215.79 per sec.)
    ignored errors:                      3      (0.10 per sec.)
    reconnects:                          1      (0.03 per sec.)
"""


def by_name(figures: list[BenchmarkFigure]) -> dict[str, BenchmarkFigure]:
    assert len({figure.name for figure in figures}) == len(figures)
    return {figure.name: figure for figure in figures}


def test_parses_sysbench_counts() -> None:
    assert SysbenchCounts.parse(SYSBENCH) == SysbenchCounts(4826, 96_520, 3, 1)
    assert SysbenchCounts.parse(SYSBENCH.replace("reconnects:", "others:")) is None
    assert SysbenchCounts.parse(SYSBENCH.splitlines()[0]) is None


def test_sysbench_runs_until_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sysbench.find_program", lambda program, package: f"/bin/{program}")
    command = SysbenchLoad(10_000, 32).command(4000)
    assert command[0] == "/bin/sysbench"
    assert {"--time=0", "--threads=32", "--table-size=10000", "--mysql-port=4000"} <= set(command)
    assert not any("ssl" in word or "ps-mode" in word or "ignore" in word for word in command)
    other = SysbenchLoad(10_000, 32, prepared=False, tls=True).command(4000)
    assert {"--mysql-ssl=on", "--db-ps-mode=disable"} <= set(other)


ASKED = (
    TimedStatement(1.0, 0.001, False),
    TimedStatement(1.9, 0.2, True),
    TimedStatement(3.0, 0.05, False),
    TimedStatement(5.0, 0.4, False),
)


def test_statement_belongs_to_overlapping_windows() -> None:
    windows = [TimeWindow(2.0, 3.01)]
    assert statements_during(ASKED, windows) == [ASKED[1], ASKED[2]]
    assert statements_during(ASKED, windows, inside=False) == [ASKED[0], ASKED[3]]
    assert latencies_ms(ASKED) == pytest.approx([400, 200, 50, 1])
    assert [slowest_ms(ASKED), slowest_ms([])] == pytest.approx([400, 0])


def test_all_combinations_have_distinct_names() -> None:
    assert len({combination.name for combination in ALL_COMBINATIONS}) == 8
    assert ALL_COMBINATIONS[0].name == "prepared, TLS, 2 workers"
    assert ALL_COMBINATIONS[-1].name == "text, plain, 1 worker"


PAGE = """\
# TYPE envoy_tidevoy_migrations counter
envoy_tidevoy_migrations{node="127.0.0.1:4000",result="moved",reason="ok"} 12
envoy_tidevoy_migrations{node="127.0.0.1:4000",result="stayed",reason="slow"} 2
# TYPE envoy_tidevoy_sessions gauge
envoy_tidevoy_sessions{node="127.0.0.1:4000",state="idle"} 5
"""


def rolled() -> RollingRestartResult:
    moves: dict[str, dict[tuple[str, str], int]] = {}
    for node, result, reason, count in parse_migration_counts(PAGE):
        moves.setdefault(node, {})[result, reason] = count
    return RollingRestartResult(
        Combination(True, False, 2), SysbenchCounts(1, 20, 0, 0), moves, ASKED, [TimeWindow(2.9, 3.01)]
    )


def test_rolling_restart_separates_drain_and_rest() -> None:
    result = rolled()
    assert (result.migrated, result.failed_by_reason) == ({"127.0.0.1:4000": 12}, {"slow": 2})
    slow = [result.slowest_while_draining, result.slowest_while_migrating, result.slowest_at_rest]
    assert slow == pytest.approx([50, 200, 400])
    figures = by_name(rolling_figures(result, 3))
    assert [figure.verdict for figure in figures.values()] == ["met", "met", "missed", ""]


def test_counts_epoll_entries() -> None:
    fdinfo = (
        "pos:\t0\nflags:\t02\ntfd:       5 events:       19 data: 5 pos:0\ntfd:       6 events: 19 data: 6\n"
    )
    assert count_epoll_entries(fdinfo) == 2


def test_samples_resources_of_a_process() -> None:
    async def measure_own_usage() -> ResourceUsage:
        return ResourceUsage.of_process(os.getpid())

    usage = asyncio.run(measure_own_usage())
    assert usage.memory_mib > 1
    # An event loop has an epoll descriptor, which watches at least the wake-up socket of the loop.
    assert usage.open_files > 3
    assert usage.epoll_entries >= 1


def page(**counts: int) -> dict[str, object]:
    buckets = [{"lower_bound": int(name[1:]), "width": 10, "count": count} for name, count in counts.items()]
    details = [{"name": "listener_manager.worker_0.dispatcher.loop_duration_us", "totals": buckets}]
    return {"stats": [{"histograms": {"supported_percentiles": [], "details": details}}]}


def test_subtract_keeps_only_new_loop_iterations() -> None:
    before, now = (
        event_loop_latency.parse_stats(page(_20=5, _9000=1)),
        event_loop_latency.parse_stats(page(_20=8, _1500=2, _9000=1)),
    )
    between = event_loop_latency.subtract(now, before)
    assert between == {30.0: 3, 1510.0: 2}
    assert event_loop_latency.longest_ms(between) == pytest.approx(1.51)
    assert (
        event_loop_latency.count_longer(between, 1.0),
        event_loop_latency.count_longer(between, 0.01),
    ) == (2, 5)
    assert event_loop_latency.longest_ms({}) == 0.0
    assert event_loop_latency.parse_stats({"stats": []}) == {}


def test_session_count_fits_the_file_limit() -> None:
    assert fit_session_count(10_000, 1_048_576) == 10_000
    assert fit_session_count(10_000, 20_000) == 9_900
    assert fit_session_count(99, 20_000) == 90


def test_idle_session_figures_compare_drain_and_baseline() -> None:
    quiet, drained = (
        ObservedPhase(TimeWindow(0.5, 1.5), {30.0: 9}),
        ObservedPhase(TimeWindow(1.8, 3.02), {30.0: 9, 12_000.0: 1}),
    )
    figures = by_name(idle_sessions_figures(IdleSessionsResult(10_000, 1000, ASKED, quiet, drained)))
    assert [(figure.value, figure.verdict) for figure in figures.values()] == [
        (pytest.approx(1.22), "met"),
        (pytest.approx(200), "missed"),
        (12.0, "missed"),
        (pytest.approx(1), ""),
        (0.03, ""),
    ]


def test_growing_resources_miss_the_target() -> None:
    def verdicts(last: ResourceUsage, after: ResourceUsage) -> list[str]:
        samples = [
            (10_000, ResourceUsage(100.0, 2020, 2010)),
            (50_000, ResourceUsage(101, 2020, 2010)),
            (100_000, last),
        ]
        result = RepeatedMigrationsResult(1000, 200.0, ResourceUsage(80.0, 20, 10), samples, after, 0)
        return [figure.verdict for figure in repeated_migrations_figures(result)]

    assert set(verdicts(ResourceUsage(104.0, 2020, 2010), ResourceUsage(100.0, 20, 10))) == {"met"}
    grown = verdicts(ResourceUsage(106.0, 2021, 2011), ResourceUsage(100.0, 21, 11))
    assert grown == ["missed"] * 5 + ["met"]


class Link(asyncio.Transport):
    """The transport to which a fake node's session writes."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.9.0.1", 4000)})
        self.written = b""
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def take(self) -> bytes:
        written, self.written = self.written, b""
        return written

    def abort(self) -> None:
        self.ended = True

    close = abort


CLIENT_CAPABILITIES = (1 | 1 << 9 | 1 << 13 | 1 << 15 | 1 << 19).to_bytes(4, "little")
HEAD = CLIENT_CAPABILITIES + (1 << 24).to_bytes(4, "little") + b"\x2d" + bytes(23) + b"root\0"
BY_PASSWORD = HEAD + b"\0mysql_native_password\0"
PREPARE = b"\x03SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'"


def node(shared_state: SharedNodeState) -> tuple[NodeSession, Link]:
    session, link = NodeSession(shared_state), Link()
    session.connection_made(link)
    assert link.take()[4] == 10
    return session, link


def login(shared_state: SharedNodeState, token: bytes | None = None) -> tuple[NodeSession, Link]:
    """Log in by `token`, or with an empty password without a token."""
    session, link = node(shared_state)
    body = BY_PASSWORD
    if token is not None:
        lenenc = b"\xfc" + len(token).to_bytes(2, "little")
        capabilities = (int.from_bytes(CLIENT_CAPABILITIES, "little") | 1 << 21).to_bytes(4, "little")
        body = capabilities + HEAD[4:] + lenenc + token + b"tidb_session_token\0"
    session.data_received(frame(1, body))
    return session, link


def test_session_migrates_between_fake_nodes() -> None:
    source, target = SharedNodeState(make_signer(b"key")), SharedNodeState(make_signer(b"key"))
    session, link = login(source)
    assert (link.take()[4], source.sessions["127.9.0.1:4000"]) == (0, 1)
    session.data_received(frame(0, b"\x03SHOW SESSION_STATES"))
    response = link.take()
    token = response[response.index(b'{"username"') :]
    token = token[: token.index(b"}") + 1]
    states = response[response.index(b'{"user-var-values"') :]
    states = states[: states.index(b"}}") + 2]
    verify_token(target.signer, token, "root", 0)

    arrived, target_link = login(target, token)
    assert target_link.take()[4] == 0
    arrived.data_received(frame(0, PREPARE) + frame(0, b"\x03SET SESSION_STATES '" + states + b"'"))
    arrived.data_received(frame(0, bytes((MySqlCommand.PING,))))
    assert target_link.take().count(b"\0\0\0\2\0\0\0") == 3
    session.connection_lost(None)
    assert (source.sessions["127.9.0.1:4000"], target.sessions["127.9.0.1:4000"]) == (0, 1)
    assert (source.logins["127.9.0.1:4000"], target.logins["127.9.0.1:4000"]) == (1, 0)
    assert list(source.emptied_at) == ["127.9.0.1:4000"]
    assert json.loads(target.report_as_json())["violations"] == source.violations == []


@pytest.mark.parametrize(
    "sent",
    [
        frame(0, b"\x03select 1"),
        frame(1, b"\x0e"),
        frame(0, b"\x16select 1"),
    ],
)
def test_fake_node_rejects_other_commands(sent: bytes) -> None:
    shared_state = SharedNodeState(make_signer(b"key"))
    session, link = login(shared_state)
    session.data_received(sent)
    assert link.ended
    assert len(shared_state.violations) == 1


def test_fake_node_accepts_only_tokens_of_its_cluster() -> None:
    shared_state = SharedNodeState(make_signer(b"key"))
    token = json.dumps(issue_token(make_signer(b"another"), "root", 0)).encode()
    _, link = login(shared_state, token)
    assert link.ended
    assert "its signature is not from our key" in shared_state.violations[0]


def test_fake_node_requires_states_after_a_token() -> None:
    shared_state = SharedNodeState(make_signer(b"key"))
    session, link = login(
        shared_state, json.dumps(issue_token(shared_state.signer, "root", time.time_ns())).encode()
    )
    assert not link.ended
    session.data_received(frame(0, bytes((MySqlCommand.PING,))))
    assert link.ended
    assert "before the states" in shared_state.violations[0]
