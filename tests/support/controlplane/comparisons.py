"""Comparisons of replays for tests."""

from __future__ import annotations

from typing import Any

from controlplane.model.comparison import (
    Comparison,
    ComparisonTotals,
    DigestComparison,
    ErrorChange,
    LatencySummary,
)

SLOW, FAST, SAME, FAILING = ("5" * 64, "f" * 64, "0" * 64, "e" * 64)
"""Digests: slower by 2.1, faster, equally fast, with a new error."""


def digest_comparison(digest: str, ratio: float | None, margin: float = 0.1, **more: Any) -> DigestComparison:
    """Return a digest whose interval reaches from `ratio` less `margin` to `ratio` plus `margin`."""
    values: dict[str, Any] = {
        "text": f"select ? from {digest[0]}",
        "statements": 200,
        "pairs": 100,
        "old": LatencySummary(1_000.0, 2_000.0, 1_100.0),
        "new": LatencySummary(1_000.0 * (ratio or 1), 2_000.0 * (ratio or 1), 1_100.0 * (ratio or 1)),
        "ratio": ratio,
        "ratio_low": None if ratio is None else ratio - margin,
        "ratio_high": None if ratio is None else ratio + margin,
        **more,
    }
    return DigestComparison(digest, **values)


def comparison_with(*digests: DigestComparison, new_errors: tuple[ErrorChange, ...] = ()) -> Comparison:
    """Return a comparison of these digests."""
    statements = sum(entry.statements for entry in digests)
    totals = ComparisonTotals(
        old_statements=statements,
        new_statements=statements,
        pairs=sum(entry.pairs for entry in digests),
        differing_results=sum(entry.differing_results for entry in digests),
    )
    return Comparison(totals, digests, new_errors)


def upgrade_with_problems() -> Comparison:
    """Return a comparison with a digest of each kind."""
    return comparison_with(
        digest_comparison(SAME, 1.01, differing_results=3),
        digest_comparison(FAST, 0.5),
        digest_comparison(SLOW, 2.1),
        digest_comparison(FAILING, None, new=LatencySummary(errors=7)),
        new_errors=(ErrorChange(FAILING, 1146, 7),),
    )
