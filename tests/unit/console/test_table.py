"""Which nodes the table shows, in which order; and how numbers and lines are written."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.console import formatting, sparkline
from api.console.table import Page, Query, Row, Sort, paged
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan


def row(
    address: str,
    state: State = State.ACTIVE,
    sessions: int | None = 0,
    rate: float | None = None,
    version: str = "v8.5.3",
    zone: str = "",
) -> Row:
    node = Node(address, Source.PD, labels={"zone": zone} if zone else {})
    return Row(NodePlan(node, state, "a reason", 0.0, version=version, zone=zone), sessions, rate)


FLEET = [
    row("tidb-10:4000", sessions=5, zone="a"),
    row("tidb-9:4000", State.UNHEALTHY, sessions=None, zone="b"),
    row("tidb-1:4000", State.DRAINING, sessions=7, version="v8.5.10"),
]


def shown(query: Query, per_page: int = 50) -> list[str]:
    return [each.address.partition(":")[0] for each in paged(FLEET, query, per_page).rows]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(), ["tidb-1", "tidb-9", "tidb-10"]),  # by number, not by letter
        (Query(descending=True), ["tidb-10", "tidb-9", "tidb-1"]),
        (Query(sort=Sort.STATE), ["tidb-9", "tidb-1", "tidb-10"]),  # what needs a look first
        (Query(sort=Sort.SESSIONS), ["tidb-10", "tidb-1", "tidb-9"]),
        (Query(sort=Sort.SESSIONS, descending=True), ["tidb-1", "tidb-10", "tidb-9"]),  # unknown last
        (Query(sort=Sort.VERSION, descending=True), ["tidb-1", "tidb-9", "tidb-10"]),
        (Query(state=State.DRAINING), ["tidb-1"]),
        (Query(text="ZONE=B"), ["tidb-9"]),
        (Query(text="v8.5.10"), ["tidb-1"]),
        (Query(text="nowhere"), []),
    ],
)
def test_rows_are_found_and_sorted(query: Query, expected: list[str]) -> None:
    assert shown(query) == expected


def test_pages_hold_all_rows_and_one_too_far_is_the_last() -> None:
    assert [shown(Query(page=number), per_page=2) for number in (1, 2)] == [["tidb-1", "tidb-9"], ["tidb-10"]]
    far: Page = paged(FLEET, Query(page=999), 2)
    assert (far.query.page, far.pages, far.found, far.most_sessions) == (2, 2, 3, 7)
    assert paged([], Query(page=7)).query.page == 1


def test_a_column_is_turned_round_by_a_second_click() -> None:
    once = Query(page=3).sorted_by(Sort.SESSIONS)
    assert once == Query(sort=Sort.SESSIONS)
    assert once.sorted_by(Sort.SESSIONS).descending
    assert not once.sorted_by(Sort.SESSIONS).sorted_by(Sort.SESSIONS).descending


queries = st.builds(
    Query,
    st.text(st.characters(codec="utf-8"), max_size=40).map(str.strip),
    st.none() | st.sampled_from(State),
    st.sampled_from(Sort),
    st.booleans(),
    st.integers(1, 999_999),
)


@given(queries)
def test_a_link_says_all_of_a_query(query: Query) -> None:
    assert Query.read(dict(parse_qsl(urlsplit(query.link).query))) == query


@given(st.dictionaries(st.sampled_from(["text", "state", "sort", "order", "page"]), st.text(max_size=300)))
def test_any_address_of_the_page_can_be_read(given_fields: dict[str, str]) -> None:
    query = Query.read(given_fields)
    assert query.page >= 1
    assert paged(FLEET, query).query.page == 1


@given(
    queries,
    st.lists(st.builds(row, st.from_regex(r"[a-z]{1,3}-[0-9]{1,3}:4000", fullmatch=True)), max_size=30),
)
def test_pages_together_are_all_rows_once(query: Query, fleet: list[Row]) -> None:
    found = [
        each
        for page in range(1, paged(fleet, query, 4).pages + 1)
        for each in paged(fleet, query.at_page(page), 4).rows
    ]
    assert len(found) == paged(fleet, query, 4).found <= len(fleet)
    assert {id(each) for each in found} <= {id(each) for each in fleet}
    assert len({id(each) for each in found}) == len(found)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formatting.count(None), formatting.NOT_KNOWN),
        (formatting.count(12345), "12,345"),
        (formatting.rate(0.0), "0"),
        (formatting.rate(0.44), "0.4"),
        (formatting.rate(1234.5), "1,234"),
        (formatting.latency(0.00042), "0.42\u202fms"),
        (formatting.latency(0.0123), "12\u202fms"),
        (formatting.latency(1.2), "1.20\u202fs"),
        (formatting.percent(0.416), "42\u202f%"),
        (formatting.duration(None), formatting.NOT_KNOWN),
        (formatting.duration(-3), "0 s"),
        (formatting.duration(125), "2 min 5 s"),
        (formatting.duration(3600), "1 h"),
        (formatting.duration(2 * 86_400 + 3 * 3600 + 59), "2 d 3 h"),
        (formatting.clock(0.0), "1970-01-01 00:00:00 UTC"),
        (formatting.machine(0.0), "1970-01-01T00:00:00Z"),
    ],
)
def test_numbers_and_times_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected


def test_a_line_ends_at_the_right_edge_and_breaks_where_nothing_is_known() -> None:
    assert sparkline.lines([1.0, 2.0, None, 2.0, 0.0], 5) == ["0.0,14.0 30.0,2.0", "90.0,2.0 120.0,26.0"]
    assert sparkline.lines([None, 3.0], 120) == []
    assert sparkline.lines([], 120) == []


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=120))
def test_a_line_stays_within_its_picture(values: list[float | None]) -> None:
    for line in sparkline.lines(values, 120):
        for point in line.split():
            across, down = map(float, point.split(","))
            assert 0 <= across <= sparkline.WIDTH
            assert 0 <= down <= sparkline.HEIGHT
