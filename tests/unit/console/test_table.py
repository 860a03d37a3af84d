"""The console's table of nodes (filter, sort order, pages), number formats, and sparklines."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.console import charts, formatting
from api.console.table import NodeRow, SortColumn, TablePage, TableQuery, paginate
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan


def row(
    address: str,
    state: State = State.ACTIVE,
    sessions: int | None = 0,
    rate: float | None = None,
    version: str = "v8.5.3",
    zone: str = "",
) -> NodeRow:
    node = Node(address, Source.PD, labels={"zone": zone} if zone else {})
    return NodeRow(NodePlan(node, state, "a reason", 0.0, version=version, zone=zone), sessions, rate)


FLEET = [
    row("tidb-10:4000", sessions=5, zone="a"),
    row("tidb-9:4000", State.UNHEALTHY, sessions=None, zone="b"),
    row("tidb-1:4000", State.DRAINING, sessions=7, version="v8.5.10"),
]


def page_names(query: TableQuery, per_page: int = 50) -> list[str]:
    return [node_row.address.partition(":")[0] for node_row in paginate(FLEET, query, per_page).rows]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (TableQuery(), ["tidb-1", "tidb-9", "tidb-10"]),  # numeric order
        (TableQuery(descending=True), ["tidb-10", "tidb-9", "tidb-1"]),
        (
            TableQuery(sort=SortColumn.STATE),
            ["tidb-9", "tidb-1", "tidb-10"],
        ),  # unhealthy first
        (TableQuery(sort=SortColumn.SESSIONS), ["tidb-10", "tidb-1", "tidb-9"]),
        (
            TableQuery(sort=SortColumn.SESSIONS, descending=True),
            ["tidb-1", "tidb-10", "tidb-9"],
        ),  # unknown values last
        (TableQuery(sort=SortColumn.VERSION, descending=True), ["tidb-1", "tidb-9", "tidb-10"]),
        (TableQuery(state=State.DRAINING), ["tidb-1"]),
        (TableQuery(text="ZONE=B"), ["tidb-9"]),
        (TableQuery(text="v8.5.10"), ["tidb-1"]),
        (TableQuery(text="nowhere"), []),
    ],
)
def test_rows_are_filtered_and_sorted(query: TableQuery, expected: list[str]) -> None:
    assert page_names(query) == expected


def test_page_number_beyond_the_end_shows_the_last_page() -> None:
    assert [page_names(TableQuery(page=number), per_page=2) for number in (1, 2)] == [
        ["tidb-1", "tidb-9"],
        ["tidb-10"],
    ]
    last: TablePage = paginate(FLEET, TableQuery(page=999), 2)
    assert (last.query.page, last.pages, last.match_count, last.max_sessions) == (2, 2, 3, 7)
    assert paginate([], TableQuery(page=7)).query.page == 1


def test_second_click_on_a_column_reverses_the_order() -> None:
    ascending = TableQuery(page=3).sorted_by(SortColumn.SESSIONS)
    assert ascending == TableQuery(sort=SortColumn.SESSIONS)
    assert ascending.sorted_by(SortColumn.SESSIONS).descending
    assert not ascending.sorted_by(SortColumn.SESSIONS).sorted_by(SortColumn.SESSIONS).descending


queries = st.builds(
    TableQuery,
    st.text(st.characters(codec="utf-8"), max_size=40).map(str.strip),
    st.none() | st.sampled_from(State),
    st.sampled_from(SortColumn),
    st.booleans(),
    st.integers(1, 999_999),
)


@given(queries)
def test_link_round_trips_the_query(query: TableQuery) -> None:
    assert TableQuery.from_params(dict(parse_qsl(urlsplit(query.link).query))) == query


@given(st.dictionaries(st.sampled_from(["text", "state", "sort", "order", "page"]), st.text(max_size=300)))
def test_arbitrary_query_parameters_are_accepted(params: dict[str, str]) -> None:
    query = TableQuery.from_params(params)
    assert query.page >= 1
    assert paginate(FLEET, query).query.page == 1


@given(
    queries,
    st.lists(st.builds(row, st.from_regex(r"[a-z]{1,3}-[0-9]{1,3}:4000", fullmatch=True)), max_size=30),
)
def test_pages_together_contain_each_match_once(query: TableQuery, fleet: list[NodeRow]) -> None:
    matches = [
        node_row
        for page in range(1, paginate(fleet, query, 4).pages + 1)
        for node_row in paginate(fleet, query.at_page(page), 4).rows
    ]
    assert len(matches) == paginate(fleet, query, 4).match_count <= len(fleet)
    assert {id(node_row) for node_row in matches} <= {id(node_row) for node_row in fleet}
    assert len({id(node_row) for node_row in matches}) == len(matches)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.format_count(None), formatting.UNKNOWN),
        (formatting.format_count(12345), "12,345"),
        (formatting.format_rate(0.0), "0"),
        (formatting.format_rate(0.44), "0.4"),
        (formatting.format_rate(1234.5), "1,234"),
        (formatting.format_latency(0.00042), "0.42\u202fms"),
        (formatting.format_latency(0.0123), "12\u202fms"),
        (formatting.format_latency(1.2), "1.20\u202fs"),
        (formatting.format_percent(0.416), "42\u202f%"),
        (formatting.format_duration(None), formatting.UNKNOWN),
        (formatting.format_duration(-3), "0 s"),
        (formatting.format_duration(125), "2 min 5 s"),
        (formatting.format_duration(3600), "1 h"),
        (formatting.format_duration(2 * 86_400 + 3 * 3600 + 59), "2 d 3 h"),
        (formatting.format_time(0.0), "1970-01-01 00:00:00 UTC"),
        (formatting.format_iso_time(0.0), "1970-01-01T00:00:00Z"),
    ],
)
def test_numbers_and_times_are_formatted(text: str, expected: str) -> None:
    assert text == expected


def test_sparkline_ends_at_the_right_edge_and_breaks_at_unknown_values() -> None:
    assert charts.sparkline([1.0, 2.0, None, 2.0, 0.0], 5) == [
        "0.0,14.0 30.0,2.0",
        "90.0,2.0 120.0,26.0",
    ]
    assert charts.sparkline([None, 3.0], 120) == []
    assert charts.sparkline([], 120) == []


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=120))
def test_sparkline_stays_within_its_area(values: list[float | None]) -> None:
    for line in charts.sparkline(values, 120):
        for point in line.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= charts.SPARKLINE_WIDTH
            assert 0 <= y <= charts.SPARKLINE_HEIGHT
