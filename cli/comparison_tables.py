"""Formats comparisons of replays as rows of tables. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controlplane.model.comparison import Comparison, DigestComparison, ErrorChange, Finding
from controlplane.verification.texts import DIGEST_DIGITS, NO_DIGEST, format_microseconds, format_ratio
from controlplane.verification.verdict import ranked_digests

DIGEST_HEADERS = (
    *("RATIO", "OLD", "NEW", "OLD P95", "NEW P95", "PAIRS", "OLD ERRORS", "NEW ERRORS", "DIFFER", "DIGEST"),
    "STATEMENT",
)
ERROR_HEADERS = ("ERROR", "ONLY ON", "COUNT", "DIGEST", "STATEMENT")


def digest_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row per digest: those with new errors first, then those that have become slowest."""
    return [_digest_row(entry) for entry in ranked_digests(comparison)]


def error_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row per digest and error code that only one side has, new errors first."""
    return [
        *_error_rows(comparison, comparison.new_errors, "new"),
        *_error_rows(comparison, comparison.gone_errors, "old"),
    ]


def describe_totals(comparison: Comparison) -> str:
    """Return the sums over all digests in one line."""
    totals = comparison.totals
    parts = [f"{totals.pairs} statements of {len(comparison.digests)} digests ran on both sides"]
    if totals.differing_results:
        parts.append(f"{totals.differing_results} of them have differing results")
    parts += [
        f"{count} {text}"
        for count, text in (
            (totals.missing, "ran on the old side only"),
            (totals.extra, "ran on the new side only"),
            (totals.old_dropped, "results of the old side are lost"),
            (totals.new_dropped, "results of the new side are lost"),
        )
        if count
    ]
    return "; ".join(parts)


def verdict_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding; one line if there is none."""
    lines = [finding.message if finding.is_blocking else f"note: {finding.message}" for finding in findings]
    return lines or ["no new errors, no slower statements, no differing results"]


def _digest_row(entry: DigestComparison) -> tuple[str, ...]:
    old, new = entry.old, entry.new
    return (
        format_ratio(entry),
        *(format_microseconds(value) for value in (old.median_us, new.median_us, old.p95_us, new.p95_us)),
        *(str(count) for count in (entry.pairs, old.errors, new.errors, entry.differing_results)),
        *_statement_cells(entry.digest, entry.text),
    )


def _error_rows(
    comparison: Comparison, errors: Iterable[ErrorChange], side: str
) -> Iterable[tuple[str, ...]]:
    for error in sorted(errors, key=lambda error: -error.count):
        statement = _statement_cells(error.digest, comparison.text_of(error.digest))
        yield (str(error.code), side, str(error.count), *statement)


def _statement_cells(digest: str | None, text: str | None) -> tuple[str, str]:
    if digest is None:
        return "-", NO_DIGEST
    return digest[:DIGEST_DIGITS], " ".join((text or "").split()) or "the text is not known"
