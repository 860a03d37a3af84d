"""The verdict on a comparison: new errors, slower statements, differing results, and missing statements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from controlplane.model.comparison import (
    DEFAULT_MAX_RATIO,
    Comparison,
    DigestComparison,
    ErrorChange,
    Finding,
    FindingKind,
    VerificationReport,
)
from controlplane.verification.texts import format_microseconds, format_ratio, name_statement

# An error is new if more than this many times as many pairs have it on the new server only as on the old one.
_MAX_ERROR_RATIO = 2
_MAX_MISSING_SHARE = 0.01
# What a stored report keeps. It is a part of its rollout's record, which is written as a whole.
_MAX_REPORT_DIGESTS, _MAX_REPORT_ERRORS, _MAX_REPORT_TEXT_CHARS = 30, 30, 300


def judge(
    comparison: Comparison,
    max_ratio: float = DEFAULT_MAX_RATIO,
    *,
    results_must_match: bool = False,
    is_same_replay: bool = False,
) -> tuple[Finding, ...]:
    """Return what is worse or different on the new server; blocking findings first, the worst ones first.

    Differing results block only with `results_must_match`: between two replays, clients may change the data.
    `is_same_replay`: both sides replayed the same statements, so hardly any may be missing.
    """
    findings = [
        *_new_errors(comparison),
        *_slower_digests(comparison, max_ratio),
        *_differing_results(comparison, is_blocking=results_must_match),
        *(_missing_statements(comparison) if is_same_replay else ()),
    ]
    return _blocking_first(findings)


def needs_confirmation(findings: tuple[Finding, ...]) -> bool:
    """Return whether only slower digests block: among many digests, a few are slower by chance."""
    blocking = [finding for finding in findings if finding.is_blocking]
    return bool(blocking) and all(finding.kind is FindingKind.SLOWER for finding in blocking)


def confirm(first: tuple[Finding, ...], second: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings of a second replay. Digests block as slower only if they were so in both."""
    slower_before = {finding.digest for finding in first if finding.kind is FindingKind.SLOWER}
    findings = [
        replace(finding, is_blocking=False)
        if finding.kind is FindingKind.SLOWER and finding.digest not in slower_before
        else finding
        for finding in second
    ]
    return _blocking_first(findings)


def is_new_error(error: ErrorChange) -> bool:
    """Return whether more than twice as many pairs have it on the new server only as on the old server."""
    return error.count > _MAX_ERROR_RATIO * error.other_count


def is_slower(entry: DigestComparison, max_ratio: float) -> bool:
    """Return whether a digest is slower on the new server.

    It is if its ratio is at least `max_ratio`, and the whole confidence interval of the ratio is above 1.
    """
    return (
        entry.ratio is not None
        and entry.ratio_low is not None
        and entry.ratio_low > 1.0
        and entry.ratio >= max_ratio
    )


def ranked_digests(comparison: Comparison) -> list[DigestComparison]:
    """Return the digests: those with new errors first, then those that have become slowest."""
    with_new_errors = {error.digest for error in comparison.new_errors if is_new_error(error)}
    return sorted(
        comparison.digests,
        key=lambda entry: (
            entry.digest not in with_new_errors,
            entry.ratio is None,
            -(entry.ratio or 0.0),
            entry.digest or "",
        ),
    )


def summarize(findings: tuple[Finding, ...]) -> str:
    """Return the worst blocking finding, and how many more there are; empty if nothing blocks."""
    blocking = [finding for finding in findings if finding.is_blocking]
    if not blocking:
        return ""
    if (more := len(blocking) - 1) == 0:
        return blocking[0].message
    return f"{blocking[0].message} (and {more} more {'finding' if more == 1 else 'findings'})"


def shorten_report(report: VerificationReport) -> VerificationReport:
    """Return a report that is small enough to be stored: the first digests, errors and findings."""
    comparison = report.comparison
    digests = ranked_digests(comparison)[:_MAX_REPORT_DIGESTS]
    return replace(
        report,
        comparison=replace(
            comparison,
            digests=tuple(
                replace(entry, text=entry.text[:_MAX_REPORT_TEXT_CHARS] if entry.text else entry.text)
                for entry in digests
            ),
            new_errors=comparison.new_errors[:_MAX_REPORT_ERRORS],
            gone_errors=comparison.gone_errors[:_MAX_REPORT_ERRORS],
        ),
        findings=report.findings[:_MAX_REPORT_DIGESTS],
        digest_count=len(comparison.digests),
    )


def _blocking_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: not finding.is_blocking))


def _new_errors(comparison: Comparison) -> Iterator[Finding]:
    for error in sorted(comparison.new_errors, key=lambda error: -error.count):
        statement = name_statement(error.digest, comparison.text_of(error.digest))
        if is_new_error(error):
            message = f"new error {error.code} ({_times(error.count)}) at {statement}"
            yield Finding(FindingKind.NEW_ERROR, error.digest, message)


def _slower_digests(comparison: Comparison, max_ratio: float) -> Iterator[Finding]:
    slower = [entry for entry in comparison.digests if is_slower(entry, max_ratio)]
    for entry in sorted(slower, key=lambda entry: -(entry.ratio or 0.0)):
        statement = name_statement(entry.digest, entry.text)
        old, new = format_microseconds(entry.old.median_us), format_microseconds(entry.new.median_us)
        message = f"{statement} takes {format_ratio(entry)} times as long: {new} instead of {old} (median)"
        yield Finding(FindingKind.SLOWER, entry.digest, message)


def _differing_results(comparison: Comparison, *, is_blocking: bool) -> Iterator[Finding]:
    differing = [entry for entry in comparison.digests if entry.differing_results]
    for entry in sorted(differing, key=lambda entry: -entry.differing_results):
        statement = name_statement(entry.digest, entry.text)
        message = f"{entry.differing_results} of {entry.pairs} results differ at {statement}"
        yield Finding(FindingKind.DIFFERENT_RESULTS, entry.digest, message, is_blocking)


def _missing_statements(comparison: Comparison) -> Iterator[Finding]:
    totals = comparison.totals
    if totals.missing > _MAX_MISSING_SHARE * totals.old_statements:
        message = f"{totals.missing} of {totals.old_statements} statements ran on the old server only"
        yield Finding(FindingKind.MISSING, None, message)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
