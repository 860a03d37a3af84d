"""How each key of another proxy is converted: the data behind the importers and their documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cli.importers.report import Outcome


class ValueKind(StrEnum):
    """The type of a value, in words that can follow "is not"."""

    TEXT = "text"
    INTEGER = "a whole number"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    DURATION = 'a duration such as "10s"'
    TEXTS = "a list of text"
    INTEGERS = "a list of whole numbers"
    ANY = "a value"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """How one or more keys are converted.

    `setting`: to what a key is mapped; for a single key with a single setting, its path. `note`: for a mapped
    key, what else to know; for a needless key, why; for a key without equivalent, what to do instead.
    """

    keys: tuple[str, ...]
    outcome: Outcome
    setting: str = ""
    note: str = ""
    kind: ValueKind = ValueKind.ANY


# The service of an Envoy must have more time to stop than the drain needs.
STOP_TIME_NOTE = "with a long time, raise `TimeoutStopSec` of the unit, too (docs/operate/stop-envoys.md)"


def mapped(*keys: str, to: str, note: str = "", kind: ValueKind = ValueKind.ANY) -> KeyRule:
    return KeyRule(keys, Outcome.MAPPED, to, note, kind)


def needless(*keys: str, note: str, kind: ValueKind = ValueKind.ANY) -> KeyRule:
    return KeyRule(keys, Outcome.NEEDLESS, note=note, kind=kind)


def no_equivalent(*keys: str, note: str, kind: ValueKind = ValueKind.ANY) -> KeyRule:
    return KeyRule(keys, Outcome.NO_EQUIVALENT, note=note, kind=kind)


def index_rules(rules: Iterable[KeyRule]) -> Mapping[str, KeyRule]:
    """Return the rule of each key. Each key must have one rule only."""
    index: dict[str, KeyRule] = {}
    for rule in rules:
        for key in rule.keys:
            assert key not in index, key
            index[key] = rule
    return index
