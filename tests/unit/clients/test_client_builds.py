"""How clients of the matrix are installed, as far as it takes no compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.support.clients import client_builds
from tests.support.clients.client_builds import CLIENTS, ClientBuild, LanguageNotPackaged


@pytest.mark.parametrize("version", [None, "go1.19.8", "devel"])
def test_a_client_whose_language_is_not_there_is_missing_rather_than_broken(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho 'go version {version} linux/amd64'\n")
        (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (kit,) = {client.build for client in CLIENTS if client.build.name == "go"}
    with pytest.raises(LanguageNotPackaged, match=r"^Go 1\.24 or newer is not installed; install it with: "):
        kit.build(kit.sources, tmp_path)


@pytest.mark.parametrize("kit", dict.fromkeys(client.build for client in CLIENTS), ids=lambda kit: kit.name)
def test_whatever_a_build_depends_on_is_there(kit: ClientBuild) -> None:
    for pattern in kit.inputs:
        assert list(kit.sources.glob(pattern)), pattern


def test_what_two_want_at_once_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_builds, "BUILD_CACHE", tmp_path / "clients")
    began, over = Event(), Event()
    builds = []

    def build(_: Path, built: Path) -> None:
        builds.append(built)
        began.set()
        assert over.wait(10)

    kit = ClientBuild("slow", (), build)
    with ThreadPoolExecutor() as both:
        first = both.submit(kit.install)
        assert began.wait(10)
        second = both.submit(kit.install)
        over.set()
        assert [first.result(10), second.result(10)] == builds * 2
    assert len(builds) == 1
