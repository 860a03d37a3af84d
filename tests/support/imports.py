"""Helpers for the tests of importers: load their YAML as Tidevoy does, and look up rows."""

from __future__ import annotations

from cli.importers.report import ImportResult, KeyRow
from controlplane.config.settings import Settings
from controlplane.config.yaml_loader import parse_yaml


def load_settings(result: ImportResult) -> Settings:
    """Return the settings in the YAML of an import. Raises if Tidevoy would reject them.

    Certificate files are not opened: they are on other machines.
    """
    data, _ = parse_yaml(result.yaml, "tidevoy.yaml")
    return Settings.model_validate(data)


def rows_of(result: ImportResult, key: str) -> list[KeyRow]:
    return [row for row in result.rows if row.key == key]


def row_of(result: ImportResult, key: str) -> KeyRow:
    (row,) = rows_of(result, key)
    return row
