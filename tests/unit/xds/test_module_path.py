"""Tests where Tidevoy's module is searched, and when `tidevoy run` uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.xds.bootstrap import module_path
from sandbox.run import FilterChoice, RunError, _find_module


def test_prefers_packaged_module_over_built_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, built = tmp_path / "packaged.so", tmp_path / "built.so"
    monkeypatch.setattr(module_path, "_CANDIDATE_PATHS", (packaged, built))
    assert module_path.find_module() is None
    built.touch()
    assert module_path.find_module() == built.resolve()
    packaged.touch()
    assert module_path.find_module() == packaged.resolve()


def test_searches_package_and_cargo_output() -> None:
    root = Path(__file__).parents[3]
    assert [path.relative_to(root) for path in module_path._CANDIDATE_PATHS] == [
        Path("controlplane/libtidevoy.so"),
        Path("filters/target/release/libtidevoy.so"),
    ]


def test_tidevoy_run_selects_module_by_filter_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / "built.so"
    monkeypatch.setattr(module_path, "_CANDIDATE_PATHS", (built,))
    assert _find_module(FilterChoice.AUTO) is _find_module(FilterChoice.NONE) is None
    with pytest.raises(RunError, match="cargo build --release"):
        _find_module(FilterChoice.MODULE)
    built.touch()
    assert _find_module(FilterChoice.AUTO) == _find_module(FilterChoice.MODULE) == built.resolve()
    assert _find_module(FilterChoice.NONE) is None
