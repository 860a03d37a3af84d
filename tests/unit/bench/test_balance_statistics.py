"""Statistics of simulation samples, and the tables and charts made from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.balance.benchmark import case_charts, case_tables, target_figures
from bench.balance.cases import CASES, TopologyChange
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.simulation import BALANCERS, LEAST_CONNECTIONS, TIDEVOY, SimulationRecord
from bench.balance.summary import (
    NEVER_SECONDS,
    Recovery,
    SimulationSummary,
    oscillation,
    samples_until_settled,
)
from bench.machine import Machine, MachineCondition
from bench.reporting.charts import draw_line_chart
from bench.reporting.report import Findings, ReportSection, Spread, report_as_json, write_report

SVG = "{http://www.w3.org/2000/svg}"
RECOVERY = Recovery(TopologyChange(0.1, joins=1), settled_after=4, shared_after=20, imbalances=(1.2, 1.0))
RECORD = SimulationRecord(
    case=CASES["e"],
    balancer=TIDEVOY,
    imbalances=(),
    deviations=(),
    changes=(),
    sessions=1_800.0,
    moves=1_234,
    early_moves=0,
    shortest_stay=61.5,
)
OUTCOME = SimulationSummary(
    record=RECORD,
    imbalance=Spread(3_600, low=1.0, median=1.03, p99=1.08, high=1.2),
    mean=1.035,
    steady_median=1.03,
    uneven_fraction=0.01,
    moves_per_hour=1_234.0,
    oscillation=0.02,
    minute_medians=(1.03, 1.04, 1.03),
    recoveries=(
        RECOVERY,
        replace(RECOVERY, change=TopologyChange(0.3, leaves=1), settled_after=11),
        replace(RECOVERY, change=TopologyChange(0.5, joins=10), settled_after=8, shared_after=NEVER_SECONDS),
        replace(RECOVERY, change=TopologyChange(0.75, leaves=10), settled_after=2),
    ),
)
OUTCOMES = {
    (case, balancer): replace(
        OUTCOME,
        record=replace(RECORD, case=CASES[case], balancer=balancer),
        recoveries=OUTCOME.recoveries if case == "e" else (),
        mean=1.002 if balancer == LEAST_CONNECTIONS else 1.005,
        steady_median=1.3 if balancer == LEAST_CONNECTIONS else 1.06 if case == "b" else 1.03,
    )
    for case in CASES
    for balancer in BALANCERS
}


def test_settling_needs_ten_consecutive_samples() -> None:
    assert samples_until_settled([1.0] * 10, 1.1) == 0
    assert samples_until_settled([1.2, 1.0, 1.2] + [1.0] * 10, 1.1) == 3
    assert samples_until_settled([1.2] + [1.0] * 9, 1.1) == NEVER_SECONDS


def test_oscillation_is_the_rise_of_the_autocorrelation() -> None:
    wave = [math.sin(second * math.tau / 20) for second in range(600)]
    # The autocorrelation falls to -0.98 after half a period, and rises to 0.97 after a whole period.
    assert oscillation([wave, wave]) == pytest.approx(1.95, abs=0.01)
    random, fading_noise = Random(1), []  # random deviations that fade and do not return
    for _ in range(30):
        deviation, series = 0.0, []
        for _ in range(1_000):
            deviation = 0.8 * deviation + random.gauss(0, 1)
            series.append(deviation)
        fading_noise.append(series)
    assert oscillation(fading_noise) < 0.05
    drifting_wave = [3 * wave[second] + second / 100 for second in range(500)]
    assert oscillation([drifting_wave]) > 0.3, "an oscillation on top of a slow drift is measured, too"
    assert oscillation([[1.0] * 100]) == 0.0


def test_imbalance_counts_serving_nodes_by_weight() -> None:
    cluster = SimulatedCluster(1)
    for capacity in (100, 50, 100):
        cluster.add_node(capacity)
    assert cluster.imbalance() == 1.0, "an empty cluster is balanced"
    cluster.add_direct(0, 20)
    cluster.add_direct(1, 10)
    cluster.add_direct(2, 30)
    cluster.serving[2] = False
    assert cluster.imbalance() == pytest.approx(1.0)
    cluster.add_direct(1, 5)
    assert cluster.imbalance() == pytest.approx(15 / 50 / (35 / 150))


def test_targets_are_met_or_missed() -> None:
    other_seed = replace(OUTCOMES["d", LEAST_CONNECTIONS], mean=1.003)
    verdicts = {figure.name: figure.verdict for figure in target_figures(OUTCOMES, other_seed)}
    assert verdicts["a: fullest node above the mean, median"] == "met"
    assert verdicts["b: fullest node above the mean, median"] == "missed"
    assert verdicts["e: longest until below 1.10 after a join"] == "met"
    assert verdicts["e: the same after a leave"] == "missed"
    assert verdicts["h: swing"] == "met"
    assert verdicts["h: sessions that moved twice in a minute"] == "met"
    compared_with_envoys_alone = next(name for name in verdicts if name.startswith("d: fullest node"))
    assert verdicts[compared_with_envoys_alone] == "missed"


def test_unsettled_fleet_misses_its_target() -> None:
    never = replace(OUTCOME, recoveries=(replace(RECOVERY, settled_after=NEVER_SECONDS),))
    figures = target_figures({**OUTCOMES, ("e", TIDEVOY): never}, OUTCOME)
    assert next(figure for figure in figures if figure.name.startswith("e: longest")).verdict == "missed"


def test_each_case_table_has_a_row_per_balancer() -> None:
    tables = case_tables(OUTCOMES)
    assert [table.title[0] for table in tables] == list(CASES)
    for table in tables:
        assert [row[0] for row in table.rows] == list(BALANCERS)
        assert {len(row) for row in table.rows} == {len(table.headers)}
    case_e, tidevoy = list(CASES).index("e"), list(BALANCERS).index(TIDEVOY)
    assert tables[case_e].rows[tidevoy][1:] == (
        *("1.030", "1.005", "1.080", "1.200", "1.0%"),
        *("1,234", "62 s", "0.02", "8 s", "11 s"),
    )


def test_charts_show_every_case_and_every_change() -> None:
    cases, changes = case_charts(OUTCOMES)
    assert len(cases.panels) == len(CASES)
    assert [panel.title for panel in changes.panels] == [change.name for change in CASES["e"].changes]
    for drawing in (cases, changes):
        for panel in drawing.panels:
            assert list(panel.lines) == list(BALANCERS)


def test_report_contains_tables_and_charts(tmp_path: Path) -> None:
    section = ReportSection(
        "balance",
        "How it was done.",
        MachineCondition("2026-01-01 00:00:00Z", 0.5, 0.02),
        Findings(target_figures(OUTCOMES, OUTCOME), case_tables(OUTCOMES), case_charts(OUTCOMES)),
    )
    machine = Machine("a CPU", 2, 1024, "Linux 6.1", "3.11.7", "1.40.0", "3.4.23")
    document = report_as_json("balance", machine, [section])
    data, page, *charts = write_report(document, tmp_path)
    assert json.loads(data.read_text()) == json.loads(json.dumps(document))
    assert [chart.name for chart in charts] == ["balance-cases.svg", "balance-changes.svg"]
    drawn = [draw_line_chart(chart) for chart in document["benchmarks"][0]["charts"]]
    assert [chart.read_text() for chart in charts] == drawn
    text = page.read_text()
    assert "](balance-cases.svg)" in text
    assert "### d: 20 Envoys, 50 nodes, 100,000 sessions" in text
    assert "| tidevoy | 1.030 | 1.005 |" in text
