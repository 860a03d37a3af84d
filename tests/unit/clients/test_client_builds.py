"""Installation of the clients of the client matrix: what can be tested without a compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.support.build_tools import LanguageNotPackaged
from tests.support.clients import client_builds
from tests.support.clients.client_builds import CLIENTS, ClientBuild


@pytest.mark.parametrize("version", [None, "go1.19.8", "devel"])
def test_reports_client_without_language_as_missing(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho 'go version {version} linux/amd64'\n")
        (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (client_build,) = {client.build for client in CLIENTS if client.build.name == "go"}
    with pytest.raises(LanguageNotPackaged, match=r"^Go 1\.24 or newer is not installed; install it with: "):
        client_build.build(client_build.sources, tmp_path)


@pytest.mark.parametrize(
    "client_build", dict.fromkeys(client.build for client in CLIENTS), ids=lambda build: build.name
)
def test_build_inputs_exist(client_build: ClientBuild) -> None:
    for pattern in client_build.inputs:
        assert list(client_build.sources.glob(pattern)), pattern


def test_concurrent_installs_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_builds, "BUILD_CACHE", tmp_path / "clients")
    started, may_finish = Event(), Event()
    builds = []

    def build(_: Path, built: Path) -> None:
        builds.append(built)
        started.set()
        assert may_finish.wait(10)

    client_build = ClientBuild("slow", (), build)
    with ThreadPoolExecutor() as executor:
        first = executor.submit(client_build.install)
        assert started.wait(10)
        second = executor.submit(client_build.install)
        may_finish.set()
        assert [first.result(10), second.result(10)] == builds * 2
    assert len(builds) == 1
