"""`tidevoy serve`: what its process does beside running the control plane."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import run


class _Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_later_collections_skip_what_is_there_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there, garbage = _Cycle(), _Cycle()
    gone = weakref.ref(garbage)
    del garbage
    looked_through = []

    async def serve(settings: Any, load: Any, ready: Callable[[], None], *, handle_signals: bool) -> None:
        assert handle_signals
        assert gc.get_freeze_count() == 0
        ready()
        looked_through.append(any(each is there for each in gc.get_objects()))

    monkeypatch.setattr("api.server.serve", serve)
    # What else the command does to its process.
    monkeypatch.setattr("controlplane.metrics.logs.configure", lambda log: None)
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: None)
    config = tmp_path / "tidevoy.yaml"
    config.write_text("pd: {urls: ['http://127.0.0.1:2379']}\n")
    assert run(["serve", "--config", str(config)]) == 0
    assert looked_through == [False]
    assert gc.get_freeze_count() > 0
    assert gone() is None  # what was garbage already is not kept with it
