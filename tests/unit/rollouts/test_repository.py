"""The rollout repository: stores changes before they apply, follows other writers, deletes old records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.errors import RolloutRejected, StateUnavailable, UnknownRollout, VersionConflict
from controlplane.model.rollout import Rollout, RolloutPhase
from controlplane.rollouts import state_machine
from controlplane.rollouts.repository import RolloutRepository
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import Versioned
from tests.support.controlplane.rollout_simulator import rollout_spec, rollout_with_steps

A = "10.0.0.1:4000"
NEW_ROLLOUT = rollout_with_steps(rollout_spec(A))


class RepositoryTestBed:
    """A repository on a real directory, and its change notifications."""

    def __init__(self, directory: Path) -> None:
        self.store = FileStore(directory)
        self.changes: list[tuple[Rollout | None, Rollout]] = []
        self.repository = RolloutRepository(
            self.store, lambda: 1e9, lambda *change: self.changes.append(change)
        )

    async def stored(self) -> Mapping[str, Versioned[Rollout]]:
        return (await self.store.load()).rollouts


def paused(rollout: Rollout) -> Rollout:
    return state_machine.pause(rollout, "bob", 5.0)


async def test_change_is_stored_and_notified(tmp_path: Path) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    async with test_bed.store.lock():
        await test_bed.repository.create(NEW_ROLLOUT)
        changed = await test_bed.repository.change("r1", paused)
        assert (await test_bed.stored())["r1"].value == changed == test_bed.repository.get("r1")
        assert test_bed.changes == [(None, NEW_ROLLOUT), (NEW_ROLLOUT, changed)]
        assert await test_bed.repository.change("r1", paused) is changed
        assert len(test_bed.changes) == 2, "an unchanged rollout is not notified"


async def test_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    async with test_bed.store.lock():
        await test_bed.repository.create(NEW_ROLLOUT)

        async def fail_save(*_: object) -> int:
            raise StateUnavailable("rollouts.json", "no space left")

        monkeypatch.setattr(test_bed.store, "save_rollout", fail_save)
        with pytest.raises(StateUnavailable):
            await test_bed.repository.change("r1", paused)
        assert test_bed.repository.get("r1") == NEW_ROLLOUT
        with pytest.raises(UnknownRollout):
            await test_bed.repository.change("r2", paused)
        with pytest.raises(RolloutRejected):
            await test_bed.repository.change(
                "r1", lambda r: state_machine.resume(replace(r, phase=RolloutPhase.DONE), "b", 1.0)
            )


async def test_conflicting_change_is_reapplied_to_the_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer has stored a newer version, to which the second attempt applies the change."""
    test_bed = RepositoryTestBed(tmp_path)
    aborting = state_machine.abort(NEW_ROLLOUT, "carol", 4.0)
    async with test_bed.store.lock():
        await test_bed.repository.create(NEW_ROLLOUT)
        await test_bed.store.save_rollout(aborting, 1)  # by another writer
        original_save, versions = test_bed.store.save_rollout, list[int]()

        async def save(rollout: Rollout, version: int, term: int | None = None) -> int:
            versions.append(version)
            return await original_save(rollout, version, term)

        monkeypatch.setattr(test_bed.store, "save_rollout", save)
        with pytest.raises(RolloutRejected, match="it is aborting"):
            await test_bed.repository.change("r1", paused)
        assert versions == [1]
        assert test_bed.repository.get("r1").phase is RolloutPhase.ABORTING
        assert test_bed.changes[-1] == (NEW_ROLLOUT, test_bed.repository.get("r1"))


async def test_create_rejects_a_duplicate_id(tmp_path: Path) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    async with test_bed.store.lock():
        await test_bed.repository.create(NEW_ROLLOUT)
        with pytest.raises(VersionConflict):
            await test_bed.repository.create(NEW_ROLLOUT)


async def test_only_newer_versions_are_applied(tmp_path: Path) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    first, second = NEW_ROLLOUT, paused(NEW_ROLLOUT)
    test_bed.repository.restore({"r1": Versioned(first, 7)})
    assert test_bed.changes == []
    test_bed.repository.apply_stored({"r1": Versioned(second, 7)})
    assert test_bed.repository.get("r1") == first
    test_bed.repository.apply_stored(
        {"r1": Versioned(second, 8), "r2": Versioned(replace(NEW_ROLLOUT, id="r2"), 9)}
    )
    assert test_bed.repository.get("r1").phase is RolloutPhase.PAUSED
    assert [after.id for _, after in test_bed.changes] == ["r1", "r2"]
    test_bed.repository.apply_stored({"r1": Versioned(first, 7)})
    assert test_bed.repository.get("r2").id == "r2", "an older view of the store does not delete it"
    ended = replace(second, phase=RolloutPhase.ABORTED)
    test_bed.repository.apply_stored({"r1": Versioned(ended, 10)})
    test_bed.repository.apply_stored({})
    assert [rollout.id for rollout in test_bed.repository.all()] == ["r2"]


async def test_delete_old_deletes_the_oldest_ended_rollouts(tmp_path: Path) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    async with test_bed.store.lock():
        for number in range(25):
            phase = RolloutPhase.RUNNING if number == 0 else RolloutPhase.DONE
            await test_bed.repository.create(
                replace(NEW_ROLLOUT, id=f"r{number}", created_at=float(number), phase=phase)
            )
        await test_bed.repository.delete_old()
        remaining = [f"r{number}" for number in (*range(24, 4, -1), 0)]
        assert [rollout.id for rollout in test_bed.repository.all()] == remaining
        assert sorted(await test_bed.stored()) == sorted(remaining)
        assert [rollout.id for rollout in test_bed.repository.active()] == ["r0"]


async def test_unavailable_store_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_bed = RepositoryTestBed(tmp_path)
    async with test_bed.store.lock():
        await test_bed.repository.create(NEW_ROLLOUT)
        await test_bed.store.save_rollout(
            state_machine.abort(NEW_ROLLOUT, "carol", 4.0), 1
        )  # by another writer

        async def fail_read(*_: object) -> None:
            raise StateUnavailable("PD", "it does not answer")

        monkeypatch.setattr(test_bed.store, "read_rollout", fail_read)
        with pytest.raises(StateUnavailable):
            await test_bed.repository.change("r1", paused)
        assert test_bed.repository.get("r1") == NEW_ROLLOUT
