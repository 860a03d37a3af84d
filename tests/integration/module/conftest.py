"""Marks the tests that need a part of the module, so that the others can run with that part switched off."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of migrations."""
    for item in items:
        if item.path.name.startswith("test_migration"):
            item.add_marker("needs_migration")
