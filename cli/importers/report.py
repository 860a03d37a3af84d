"""What an import did with each key of the imported file. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

TABLE_HEADERS = ("LINE", "KEY", "TIDEVOY", "NOTE")
DIFFERENCE_HEADERS = ("KEY", "ITS DEFAULT", "TIDEVOY", "NOTE")


class Outcome(StrEnum):
    MAPPED = "mapped"
    NEEDLESS = "needless"
    NO_EQUIVALENT = "no equivalent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key of the imported file.

    `setting` and `value` are set only for a mapped key; other values are not shown, since they may be
    secrets. For a key without equivalent, `note` says what to do instead.
    """

    key: str
    line: int | None
    outcome: Outcome
    setting: str = ""
    value: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class DefaultDifference:
    """A key that the imported file does not set, and whose default differs from that of Tidevoy."""

    key: str
    default: str
    setting: str
    tidevoy_default: str
    note: str


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The settings as YAML, and the outcome for each key. `todos`: what the operator has to decide."""

    yaml: str
    rows: tuple[KeyRow, ...]
    differences: tuple[DefaultDifference, ...]
    todos: tuple[str, ...]

    @property
    def unknown_keys(self) -> list[str]:
        return [row.key for row in self.rows if row.outcome is Outcome.UNKNOWN]

    def as_json(self) -> dict[str, Any]:
        return {
            "yaml": self.yaml,
            "keys": [asdict(row) for row in self.rows],
            "different_defaults": [asdict(difference) for difference in self.differences],
            "todos": list(self.todos),
        }

    def summary(self) -> str:
        """Return the number of keys by outcome, and of the decisions that are left, as one sentence."""
        counts = Counter(row.outcome for row in self.rows)
        parts = [f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome]]
        return f"keys: {', '.join(parts) or 'none'}; lines with TODO: {len(self.todos)}"


def table_rows(rows: Sequence[KeyRow]) -> list[tuple[str, ...]]:
    """Return the cells of the table of keys, by line."""
    ordered = sorted(rows, key=lambda row: row.line or 0)
    return [(str(row.line or "-"), row.key, _describe_outcome(row), row.note) for row in ordered]


def _describe_outcome(row: KeyRow) -> str:
    return f"{row.setting}: {row.value}" if row.outcome is Outcome.MAPPED else str(row.outcome)


def difference_rows(differences: Sequence[DefaultDifference]) -> list[tuple[str, ...]]:
    """Return the cells of the table of defaults that differ."""
    return [
        (each.key, each.default, ": ".join(filter(None, (each.setting, each.tidevoy_default))), each.note)
        for each in differences
    ]
