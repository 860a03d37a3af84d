"""Collects the settings of an import and the outcome for each key. The result always loads. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from cli.importers.key_rules import KeyRule
from cli.importers.report import DefaultDifference, ImportResult, KeyRow, Outcome
from cli.importers.yaml_output import Assignment, Item, build_data, format_value, render
from controlplane.config import schema
from controlplane.config.schema import InvalidSetting, translate_error
from controlplane.config.settings import Settings


@dataclass(frozen=True, slots=True)
class SourceKey:
    """A key of the imported file. Comments in the YAML name it, unless it has no line."""

    name: str
    line: int | None

    @property
    def comment(self) -> str:
        return self.name if self.line is None else f"{self.name} (line {self.line})"


class SettingsDraft:
    """The settings that an importer has found so far, in any order."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._rows: list[KeyRow] = []
        self._todos: list[str] = []
        self._differences: list[DefaultDifference] = []

    def map(
        self, source: SourceKey, setting: str, value: Any, note: str = "", *, todo: str = "", shown: str = ""
    ) -> None:
        """Set a setting. If several keys have the same setting, the last value counts.

        `shown`: the value in the report, if it differs from that of the setting.
        """
        row = self.map_elsewhere(source, setting, shown or format_value(value), note)
        assignment = self._assign(setting, value, todo)
        if source.comment not in assignment.sources:
            assignment.sources.append(source.comment)
        assignment.rows.append(row)

    def map_elsewhere(self, source: SourceKey, target: str, value: str, note: str = "") -> int:
        """Add the row of a key that is mapped to something that is not set here. Returns its index."""
        return self._add_row(KeyRow(source.name, source.line, Outcome.MAPPED, target, value, note))

    def append(self, source: SourceKey, setting: str, values: dict[str, Any], note: str = "") -> None:
        """Append a mapping to a list, such as a node to `nodes`."""
        row = self.map_elsewhere(source, setting, format_value(next(iter(values.values()))), note)
        self._assign(setting, self._items(setting)).value.append(Item(values, source.comment, (row,)))

    def set_implied(self, setting: str, value: Any, reason: str, *, todo: str = "") -> None:
        """Set a setting that no single key names, but that others imply. `reason` is its comment."""
        self._assign(setting, value, todo).sources.append(reason)

    def remark(self, setting: str, text: str) -> None:
        """Add a comment above a setting that is set."""
        self._assignments[setting].remark = text

    def needless(self, source: SourceKey, note: str) -> None:
        self._add_row(KeyRow(source.name, source.line, Outcome.NEEDLESS, note=note))

    def no_equivalent(self, source: SourceKey, note: str) -> None:
        self._add_row(KeyRow(source.name, source.line, Outcome.NO_EQUIVALENT, note=note))

    def unknown(self, source: SourceKey, note: str) -> None:
        self._add_row(KeyRow(source.name, source.line, Outcome.UNKNOWN, note=note))

    def add_unset(self, source: SourceKey, rule: KeyRule | None, *, unknown: str, unused: str) -> None:
        """Add the row of a key that has set nothing. `rule`: None if the key is unknown.

        `unknown`: the note of an unknown key. `unused`: why a key that has a setting was not mapped to it.
        """
        if rule is None:
            self.unknown(source, unknown)
        elif rule.outcome is Outcome.NO_EQUIVALENT:
            self.no_equivalent(source, rule.note)
        else:
            self.needless(source, rule.note if rule.outcome is Outcome.NEEDLESS else unused)

    def todo(self, text: str) -> None:
        """Add something that the operator has to do and that belongs to no setting."""
        if text not in self._todos:
            self._todos.append(text)

    def differs(self, difference: DefaultDifference) -> None:
        self._differences.append(difference)

    def value_of(self, setting: str) -> Any:
        """Return the value of a setting, or None if it is not set."""
        assignment = self._assignments.get(setting)
        return None if assignment is None else assignment.value

    def finish(self, made_by: str, remarks: Sequence[str]) -> ImportResult:
        """Return the result. Settings that Tidevoy rejects become decisions for the operator.

        `made_by`: the command, and what it has imported. The file begins with it and with the remarks.
        """
        introduction = (
            f"Made by {made_by}. The comment behind a setting names the source of its value.",
            "xds.listen keeps its default: only an Envoy on this machine can connect (`tidevoy serve"
            " --with-envoy`). For Envoys on other machines, see docs/operate/xds-security.md.",
            *remarks,
        )
        while invalid := _find_invalid(list(self._assignments.values())):
            self._reject(invalid)
        order = {
            schema.format_path(path): index for index, (path, _) in enumerate(schema.iter_settings(Settings))
        }
        assignments = sorted(self._assignments.values(), key=lambda each: order.get(each.name, len(order)))
        todos = [each.todo for each in assignments if each.todo]
        return ImportResult(
            render(introduction, self._todos, assignments),
            tuple(self._rows),
            tuple(self._differences),
            (*self._todos, *todos),
        )

    def _assign(self, setting: str, value: Any, todo: str = "") -> Assignment:
        assignment = self._assignments.setdefault(setting, Assignment(tuple(setting.split(".")), value))
        assignment.value = value
        assignment.todo = todo or assignment.todo
        return assignment

    def _items(self, setting: str) -> list[Any]:
        assignment = self._assignments.get(setting)
        return assignment.value if assignment is not None else []

    def _add_row(self, row: KeyRow) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def _reject(self, invalid: InvalidSetting) -> None:
        """Remove what is invalid: an item of a list, or else all settings closest to the path."""
        path = tuple(map(str, invalid.path))
        for length in range(len(path), -1, -1):
            related = [each for each in self._assignments.values() if each.path[:length] == path[:length]]
            if related:
                break
        explanation = f"{schema.format_path(invalid.path)}: {invalid.problem}; {invalid.remedy}"
        for assignment in related:
            rest = invalid.path[len(assignment.path) :]
            if rest and isinstance(rest[0], int) and isinstance(assignment.value[rest[0]], Item):
                item = assignment.value.pop(rest[0])
                self._mark_rejected(item.rows, [item.comment], explanation)
                if assignment.value:
                    continue
            else:
                items = assignment.value if isinstance(assignment.value, list) else []
                rows = [row for item in items if isinstance(item, Item) for row in item.rows]
                self._mark_rejected([*assignment.rows, *rows], assignment.sources, explanation)
            del self._assignments[assignment.name]

    def _mark_rejected(self, rows: Sequence[int], sources: Sequence[str], explanation: str) -> None:
        for index in rows:
            self._rows[index] = replace(
                self._rows[index],
                outcome=Outcome.NO_EQUIVALENT,
                setting="",
                value="",
                note=f"not imported: {explanation}",
            )
        self.todo(f"{explanation} (from {', '.join(sources)})" if sources else explanation)


def _find_invalid(assignments: Sequence[Assignment]) -> InvalidSetting | None:
    """Return the first problem that Tidevoy's own validation finds, or None."""
    try:
        Settings.model_validate(build_data(assignments))
    except ValidationError as error:
        return translate_error(Settings, error.errors(include_url=False)[0])
    return None
