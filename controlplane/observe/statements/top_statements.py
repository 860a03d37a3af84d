"""The counters of the statements with the most time, for Prometheus. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controlplane.model.statements import Rows, StatementCounts, add_counts, new_counts

_STAY_FACTOR = 2  # a digest that is shown stays while it is among this many times the limit


class TopStatements:
    """Sums of each digest that is shown, since it is shown.

    A counter starts at zero and never decreases. So that series do not come and go, a shown digest is
    replaced only when it no longer ranks among twice as many digests as are shown.
    """

    def __init__(self) -> None:
        self._totals: dict[str, StatementCounts] = {}

    @property
    def totals(self) -> Mapping[str, StatementCounts]:
        """The counters by digest; a snapshot."""
        return dict(self._totals)

    def add(self, rows: Rows) -> None:
        """Count the rows of digests that are shown."""
        for key, counts in rows.items():
            if (total := self._totals.get(key.digest)) is not None:
                self._totals[key.digest] = add_counts(total, counts)

    def update(self, ranking: Sequence[str], limit: int) -> None:
        """Choose which digests are shown. `ranking`: digests by time, the one with the most time first."""
        may_stay = set(ranking[: _STAY_FACTOR * limit])
        shown = [digest for digest in self._totals if digest in may_stay][:limit]
        new = [digest for digest in ranking[:limit] if digest not in self._totals]
        shown += new[: limit - len(shown)]
        self._totals = {digest: self._totals.get(digest) or new_counts() for digest in shown}
