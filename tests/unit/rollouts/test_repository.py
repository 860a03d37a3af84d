"""Records of rollouts: kept before they count, caught up with where others write, and not kept for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.errors import RolloutRefused, StateUnavailable, UnknownRollout, VersionConflict
from controlplane.model.rollout import Rollout, RolloutPhase
from controlplane.rollouts import state_machine
from controlplane.rollouts.repository import RolloutRepository
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import Versioned
from tests.support.controlplane.rollout_simulator import rollout_spec, rollout_with_steps

A = "10.0.0.1:4000"
FRESH = rollout_with_steps(rollout_spec(A))


class Kept:
    """Records over a real directory, and all that they told."""

    def __init__(self, directory: Path) -> None:
        self.store = FileStore(directory)
        self.told: list[tuple[Rollout | None, Rollout]] = []
        self.records = RolloutRepository(self.store, lambda: 1e9, lambda *change: self.told.append(change))

    async def kept(self) -> Mapping[str, Versioned[Rollout]]:
        return (await self.store.load()).rollouts


def paused(record: Rollout) -> Rollout:
    return state_machine.pause(record, "bob", 5.0)


async def test_a_change_is_kept_and_told(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    async with kept.store.lock():
        await kept.records.create(FRESH)
        changed = await kept.records.change("r1", paused)
        assert (await kept.kept())["r1"].value == changed == kept.records.get("r1")
        assert kept.told == [(None, FRESH), (FRESH, changed)]
        assert await kept.records.change("r1", paused) is changed
        assert len(kept.told) == 2, "what changes nothing is not told"


async def test_what_cannot_be_kept_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    async with kept.store.lock():
        await kept.records.create(FRESH)

        async def full(*_: object) -> int:
            raise StateUnavailable("rollouts.json", "no space left")

        monkeypatch.setattr(kept.store, "save_rollout", full)
        with pytest.raises(StateUnavailable):
            await kept.records.change("r1", paused)
        assert kept.records.get("r1") == FRESH
        with pytest.raises(UnknownRollout):
            await kept.records.change("r2", paused)
        with pytest.raises(RolloutRefused):
            await kept.records.change(
                "r1", lambda r: state_machine.resume(replace(r, phase=RolloutPhase.DONE), "b", 1.0)
            )


async def test_a_change_by_others_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a store that others write to: the first try finds another version, which is then gone on from."""
    kept = Kept(tmp_path)
    aborting = state_machine.abort(FRESH, "carol", 4.0)
    async with kept.store.lock():
        await kept.records.create(FRESH)
        await kept.store.save_rollout(aborting, 1)  # by somebody else
        real, tries = kept.store.save_rollout, list[int]()

        async def save(record: Rollout, version: int, term: int | None = None) -> int:
            tries.append(version)
            return await real(record, version, term)

        monkeypatch.setattr(kept.store, "save_rollout", save)
        with pytest.raises(RolloutRefused, match="it is aborting"):
            await kept.records.change("r1", paused)
        assert tries == [1]
        assert kept.records.get("r1").phase is RolloutPhase.ABORTING
        assert kept.told[-1] == (FRESH, kept.records.get("r1"))


async def test_the_same_id_is_not_taken_twice(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    async with kept.store.lock():
        await kept.records.create(FRESH)
        with pytest.raises(VersionConflict):
            await kept.records.create(FRESH)


async def test_what_others_wrote_is_taken_over_when_it_is_newer(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    first, second = FRESH, paused(FRESH)
    kept.records.restore({"r1": Versioned(first, 7)})
    assert kept.told == []
    kept.records.accept({"r1": Versioned(second, 7)})
    assert kept.records.get("r1") == first
    kept.records.accept({"r1": Versioned(second, 8), "r2": Versioned(replace(FRESH, id="r2"), 9)})
    assert kept.records.get("r1").phase is RolloutPhase.PAUSED
    assert [after.id for _, after in kept.told] == ["r1", "r2"]
    kept.records.accept({"r1": Versioned(first, 7)})
    assert kept.records.get("r2").id == "r2", "a view from before it was begun does not end it"
    over = replace(second, phase=RolloutPhase.ABORTED)
    kept.records.accept({"r1": Versioned(over, 10)})
    kept.records.accept({})
    assert [each.id for each in kept.records.all()] == ["r2"]


async def test_the_oldest_that_are_over_are_forgotten(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    async with kept.store.lock():
        for number in range(25):
            phase = RolloutPhase.RUNNING if number == 0 else RolloutPhase.DONE
            await kept.records.create(replace(FRESH, id=f"r{number}", created=float(number), phase=phase))
        await kept.records.forget_old()
        left = [f"r{number}" for number in (*range(24, 4, -1), 0)]
        assert [each.id for each in kept.records.all()] == left
        assert sorted(await kept.kept()) == sorted(left)
        assert [each.id for each in kept.records.active()] == ["r0"]


async def test_a_record_is_not_forgotten_because_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    async with kept.store.lock():
        await kept.records.create(FRESH)
        await kept.store.save_rollout(state_machine.abort(FRESH, "carol", 4.0), 1)  # by somebody else

        async def away(*_: object) -> None:
            raise StateUnavailable("PD", "it does not answer")

        monkeypatch.setattr(kept.store, "read_rollout", away)
        with pytest.raises(StateUnavailable):
            await kept.records.change("r1", paused)
        assert kept.records.get("r1") == FRESH
