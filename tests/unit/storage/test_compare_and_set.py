"""Changes of a known version: a conflict is retried, and after an unknown outcome the state is read again."""

from __future__ import annotations

import pytest

from controlplane.errors import StateUnavailable, VersionConflict
from controlplane.storage.store import compare_and_set

CONFLICT = VersionConflict("the value")
FAILED = StateUnavailable("the value", "no")
UNKNOWN = StateUnavailable("the value", "no", is_certain=False)


class FakeStore:
    """Each save raises the next of the given errors, if any is left."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls: list[str] = []
        self.reload_error: Exception | None = None

    async def save(self) -> int:
        self.calls.append("save")
        if self._errors:
            raise self._errors.pop(0)
        return 7

    async def reload(self) -> None:
        self.calls.append("reload")
        if self.reload_error is not None:
            raise self.reload_error


async def test_conflict_is_reloaded_and_saved_again() -> None:
    store = FakeStore(CONFLICT, CONFLICT)
    assert await compare_and_set(store.save, store.reload) == 7
    assert store.calls == ["save", "reload", "save", "reload", "save"]


async def test_conflict_is_raised_at_the_end() -> None:
    store = FakeStore(*[CONFLICT] * 1000)
    with pytest.raises(VersionConflict):
        await compare_and_set(store.save, store.reload, retry_seconds=0.05)
    assert store.calls[-1] == "save"
    store = FakeStore(CONFLICT)
    with pytest.raises(VersionConflict):
        await compare_and_set(store.save, store.reload, retry_seconds=0)
    assert store.calls == ["save"]


@pytest.mark.parametrize(("error", "calls"), [(FAILED, ["save"]), (UNKNOWN, ["save", "reload"])])
async def test_state_is_reloaded_only_after_an_unknown_outcome(
    error: StateUnavailable, calls: list[str]
) -> None:
    for reload_error in (None, FAILED):
        store = FakeStore(error)
        store.reload_error = reload_error
        with pytest.raises(StateUnavailable) as raised:
            await compare_and_set(store.save, store.reload)
        assert (raised.value, store.calls) == (error, calls)
