"""Texts of comparisons: latencies, ratios and statements."""

from __future__ import annotations

from controlplane.model.comparison import ComparisonTotals, DigestComparison

DIGEST_DIGITS = 12
"""How many digits of a digest are shown."""
NO_DIGEST = "commands without a statement"

_MAX_TEXT_CHARS = 120  # of a statement in a message


def format_microseconds(value: float | None) -> str:
    """Format a latency with three digits: `850us`, `12.3ms`, `4.56s`; None gives `-`."""
    if value is None:
        return "-"
    if value < 999.5:
        return f"{value:.3g}us"
    if value < 999_500:
        return f"{value / 1e3:#.3g}ms".replace(".ms", "ms")
    return f"{value / 1e6:#.3g}s".replace(".s", "s")


def format_ratio(entry: DigestComparison | ComparisonTotals) -> str:
    """Format a ratio with its confidence interval: `2.10 (1.80 to 2.45)`; `-` if it is unknown."""
    if entry.ratio is None:
        return "-"
    if entry.ratio_low is None or entry.ratio_high is None:
        return f"{entry.ratio:.2f}"
    return f"{entry.ratio:.2f} ({entry.ratio_low:.2f} to {entry.ratio_high:.2f})"


def name_statement(digest: str | None, text: str | None) -> str:
    """Return a statement for a message: the beginning of its text, and of its digest."""
    if digest is None:
        return NO_DIGEST
    shown = " ".join((text or "").split())
    if len(shown) > _MAX_TEXT_CHARS:
        shown = f"{shown[:_MAX_TEXT_CHARS]}..."
    return f"`{shown}` (digest {digest[:DIGEST_DIGITS]})" if shown else f"digest {digest[:DIGEST_DIGITS]}"
