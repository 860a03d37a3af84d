"""A comparison of two replays of the same traffic (frozen data): an old server against a new one.

A statement that ran on both sides is a pair; latencies, errors and results are those of pairs. Latencies are
microseconds, and without the pairs that failed on one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DEFAULT_MAX_RATIO = 1.5
"""A digest that takes this many times as long as on the old server is slower, if that is not chance."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """The executions of one digest, or of all, on one side. Latencies are None if none succeeded."""

    median_us: float | None = None
    p95_us: float | None = None
    mean_us: float | None = None
    errors: int = 0


@dataclass(frozen=True, slots=True)
class DigestComparison:
    """One digest: how its statements ran on the old server and on the new one."""

    digest: str | None  # None: commands without a statement, such as pings
    text: str | None = None  # normalized; None: not known
    statements: int = 0  # on the old server, also without a pair
    pairs: int = 0
    old: LatencySummary = LatencySummary()
    new: LatencySummary = LatencySummary()
    ratio: float | None = None  # geometric mean of new by old of each pair; None with too few pairs
    ratio_low: float | None = None  # the bounds of the 95 % confidence interval of `ratio`
    ratio_high: float | None = None
    differing_results: int = 0  # pairs without an error whose rows differ


@dataclass(frozen=True, slots=True)
class ErrorChange:
    """The pairs of a digest that got an error code on one side only."""

    digest: str | None
    code: int
    count: int
    other_count: int = 0  # pairs of the digest that got this code on the other side


@dataclass(frozen=True, slots=True)
class ComparisonTotals:
    """Sums over all digests."""

    old_statements: int = 0
    new_statements: int = 0
    pairs: int = 0
    missing: int = 0  # statements that ran on the old server only
    extra: int = 0  # statements that ran on the new server only
    old_dropped: int = 0  # results that the old side could not write
    new_dropped: int = 0
    differing_results: int = 0
    old: LatencySummary = LatencySummary()
    new: LatencySummary = LatencySummary()
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two replays have in common, and in what they differ."""

    totals: ComparisonTotals = ComparisonTotals()
    digests: tuple[DigestComparison, ...] = ()
    new_errors: tuple[ErrorChange, ...] = ()
    gone_errors: tuple[ErrorChange, ...] = ()

    def text_of(self, digest: str | None) -> str | None:
        """Return the normalized text of a digest; None if it is not known."""
        return next((entry.text for entry in self.digests if entry.digest == digest), None)


class FindingKind(StrEnum):
    """In what a new server is worse, or different."""

    NEW_ERROR = "new_error"
    SLOWER = "slower"
    DIFFERENT_RESULTS = "different_results"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference. `is_blocking`: an upgrade must not go on with it."""

    kind: FindingKind
    digest: str | None
    message: str  # a sentence that names the statement
    is_blocking: bool = True


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The comparison of an upgraded node with an old one, with what was found. Long ones are shortened."""

    node: str
    baseline: str  # the old node
    at: float
    capture: str
    max_ratio: float
    comparison: Comparison
    findings: tuple[Finding, ...] = ()
    digest_count: int = 0  # also of the digests that are left out

    @property
    def has_passed(self) -> bool:
        """Whether the rollout may go on."""
        return not any(finding.is_blocking for finding in self.findings)
