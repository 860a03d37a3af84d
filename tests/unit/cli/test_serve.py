"""`tidevoy serve`: how it sets up its process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import run


class _Cycle:
    """Garbage that only the cyclic collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    gc.unfreeze()  # the test process has frozen the objects that existed at its start
    yield
    gc.unfreeze()


def test_later_collections_skip_objects_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live_object, garbage = _Cycle(), _Cycle()
    garbage_ref = weakref.ref(garbage)
    del garbage
    is_tracked = []

    async def serve(settings: Any, load: Any, ready: Callable[[], None], *, handle_signals: bool) -> None:
        assert handle_signals
        assert gc.get_freeze_count() == 0
        ready()
        is_tracked.append(any(tracked is live_object for tracked in gc.get_objects()))

    monkeypatch.setattr("api.server.serve", serve)
    # The command's other changes to its process would affect later tests.
    monkeypatch.setattr("controlplane.metrics.logs.configure", lambda log: None)
    descriptor_limits = list[tuple[int, int]]()
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: descriptor_limits.append(limits))
    config = tmp_path / "tidevoy.yaml"
    config.write_text("pd: {urls: ['http://127.0.0.1:2379']}\n")
    assert run(["serve", "--config", str(config)]) == 0
    assert is_tracked == [False]
    assert [soft == hard for soft, hard in descriptor_limits] == [True]
    assert gc.get_freeze_count() > 0
    assert garbage_ref() is None  # existing garbage is collected, not frozen
