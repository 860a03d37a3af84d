"""The verdict on comparisons: which differences block an upgrade, and how they are named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from controlplane.model.comparison import ErrorChange, FindingKind, VerificationReport
from controlplane.verification.comparison_file import InvalidComparison, parse_comparison
from controlplane.verification.texts import format_microseconds, format_ratio, name_statement
from controlplane.verification.verdict import (
    confirm,
    judge,
    needs_confirmation,
    ranked_digests,
    shorten_report,
    summarize,
)
from tests.support.controlplane.comparisons import (
    FAILING,
    FAST,
    SAME,
    SLOW,
    comparison_with,
    digest_comparison,
    upgrade_with_problems,
)


def test_findings_name_statement_and_size_and_blocking_ones_come_first() -> None:
    findings = judge(upgrade_with_problems())
    assert [(finding.kind, finding.digest, finding.is_blocking) for finding in findings] == [
        (FindingKind.NEW_ERROR, FAILING, True),
        (FindingKind.SLOWER, SLOW, True),
        (FindingKind.DIFFERENT_RESULTS, SAME, False),
    ]
    assert [finding.message for finding in findings] == [
        "new error 1146 (7 times) at `select ? from e` (digest eeeeeeeeeeee)",
        "`select ? from 5` (digest 555555555555) takes 2.10 (2.00 to 2.20) times as long: 2.10ms instead of"
        " 1.00ms (median)",
        "3 of 100 results differ at `select ? from 0` (digest 000000000000)",
    ]
    assert summarize(findings) == f"{findings[0].message} (and 1 more finding)"


def test_equal_servers_have_no_findings() -> None:
    findings = judge(comparison_with(digest_comparison(SAME, 1.0), digest_comparison(FAST, 0.4)))
    assert (findings, summarize(findings)) == ((), "")


@pytest.mark.parametrize(
    ("ratio", "margin", "is_slower"),
    [
        (1.5, 0.4, True),
        (1.49, 0.1, False),  # below the set ratio
        (1.5, 0.5, False),  # the interval reaches 1
        (3.0, 2.5, False),  # large, but it may be chance
        (None, 0.0, False),  # too few pairs
    ],
)
def test_slower_needs_the_ratio_and_an_interval_above_one(
    ratio: float | None, margin: float, is_slower: bool
) -> None:
    findings = judge(comparison_with(digest_comparison(SLOW, ratio, margin)), 1.5)
    assert [finding.kind for finding in findings] == [FindingKind.SLOWER] * is_slower


def test_differing_results_block_only_if_they_must_match() -> None:
    comparison = comparison_with(digest_comparison(SAME, 1.0, differing_results=1))
    assert [finding.is_blocking for finding in judge(comparison)] == [False]
    assert [finding.is_blocking for finding in judge(comparison, results_must_match=True)] == [True]


def test_digest_that_is_slower_in_one_of_two_replays_does_not_block() -> None:
    first = judge(comparison_with(digest_comparison(SLOW, 2.0), digest_comparison(FAST, 3.0)))
    assert needs_confirmation(first)
    second = judge(comparison_with(digest_comparison(SLOW, 2.0), digest_comparison(SAME, 9.0)))
    confirmed = confirm(first, second)
    assert [(each.digest, each.is_blocking) for each in confirmed] == [(SLOW, True), (SAME, False)]
    assert not needs_confirmation(())
    assert not needs_confirmation(judge(upgrade_with_problems())), "an error needs no confirmation"
    unconfirmed = confirm(first, judge(upgrade_with_problems()))
    assert [each.kind for each in unconfirmed if each.is_blocking] == [
        FindingKind.NEW_ERROR,
        FindingKind.SLOWER,
    ]


def test_error_that_the_old_server_gives_as_often_is_not_new() -> None:
    for other_count, is_new in ((0, True), (2, True), (3, False)):
        error = ErrorChange(SAME, 1105, count=6, other_count=other_count)
        findings = judge(comparison_with(digest_comparison(SAME, 1.0), new_errors=(error,)))
        assert [finding.kind for finding in findings] == [FindingKind.NEW_ERROR] * is_new


def test_missing_statements_block_only_if_both_sides_replayed_the_same() -> None:
    comparison = comparison_with(digest_comparison(SAME, 1.0))
    for missing, blocks in ((2, False), (3, True)):
        totals = replace(comparison.totals, old_statements=200, missing=missing)
        changed = replace(comparison, totals=totals)
        assert judge(changed) == ()
        kinds = [finding.kind for finding in judge(changed, is_same_replay=True)]
        assert kinds == [FindingKind.MISSING] * blocks


def test_new_errors_come_first_then_the_slowest() -> None:
    ranked = [entry.digest for entry in ranked_digests(upgrade_with_problems())]
    assert ranked == [FAILING, SLOW, SAME, FAST]


def test_stored_report_is_short_and_keeps_what_was_found() -> None:
    digests = [digest_comparison(f"{number:064}", 1.0 + number / 1000) for number in range(5_000)]
    worst = digest_comparison(SLOW, 9.0, text="select " + "x" * 100_000)
    errors = tuple(ErrorChange(FAILING, code, 1) for code in range(1, 2_000))
    comparison = comparison_with(*digests, worst, new_errors=errors)
    report = VerificationReport("a:1", "b:1", 5.0, "shop", 1.5, comparison, judge(comparison))
    short = shorten_report(report)
    assert short.comparison.digests[0].digest == SLOW
    assert short.comparison.totals == comparison.totals
    assert short.findings[0] == report.findings[0]
    assert not short.has_passed
    assert len(json.dumps(asdict(short))) < 40_000


def test_comparison_is_read_and_unknown_keys_are_skipped() -> None:
    comparison = upgrade_with_problems()
    document = asdict(comparison) | {"later": [1]}
    document["digests"][0]["old"]["p99_us"] = 4.0
    assert parse_comparison(json.dumps(document)) == comparison
    for text in ("", "[]", "{", '{"digests": [{"digest": 5}]}', '{"digests": {}}'):
        with pytest.raises(InvalidComparison, match="this is not a comparison of replays"):
            parse_comparison(text)


def test_texts() -> None:
    values = (None, 0.5, 850.0, 999.6, 12_345.0, 123_456.0, 999_600.0, 12_345_678.0)
    expected = ["-", "0.5us", "850us", "1.00ms", "12.3ms", "123ms", "1.00s", "12.3s"]
    assert [format_microseconds(value) for value in values] == expected
    entry = digest_comparison(SLOW, 2.0)
    assert format_ratio(entry) == "2.00 (1.90 to 2.10)"
    assert format_ratio(replace(entry, ratio_low=None)) == "2.00"
    assert format_ratio(digest_comparison(SLOW, None)) == "-"
    assert name_statement(None, None) == "commands without a statement"
    assert name_statement(SLOW, None) == "digest 555555555555"
    assert name_statement(SLOW, "a\n" * 200).endswith(" a a ...` (digest 555555555555)")
    assert name_statement(SLOW, "a\n\x1bb") == "`a \x1bb` (digest 555555555555)"
