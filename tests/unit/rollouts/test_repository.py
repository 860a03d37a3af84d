"""The rollout repository: stores changes before they apply, follows other writers, deletes old records."""

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
NEW_ROLLOUT = rollout_with_steps(rollout_spec(A))


class RepositoryRig:
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
    rig = RepositoryRig(tmp_path)
    async with rig.store.lock():
        await rig.repository.create(NEW_ROLLOUT)
        changed = await rig.repository.change("r1", paused)
        assert (await rig.stored())["r1"].value == changed == rig.repository.get("r1")
        assert rig.changes == [(None, NEW_ROLLOUT), (NEW_ROLLOUT, changed)]
        assert await rig.repository.change("r1", paused) is changed
        assert len(rig.changes) == 2, "an unchanged rollout is not notified"


async def test_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RepositoryRig(tmp_path)
    async with rig.store.lock():
        await rig.repository.create(NEW_ROLLOUT)

        async def fail_save(*_: object) -> int:
            raise StateUnavailable("rollouts.json", "no space left")

        monkeypatch.setattr(rig.store, "save_rollout", fail_save)
        with pytest.raises(StateUnavailable):
            await rig.repository.change("r1", paused)
        assert rig.repository.get("r1") == NEW_ROLLOUT
        with pytest.raises(UnknownRollout):
            await rig.repository.change("r2", paused)
        with pytest.raises(RolloutRefused):
            await rig.repository.change(
                "r1", lambda r: state_machine.resume(replace(r, phase=RolloutPhase.DONE), "b", 1.0)
            )


async def test_conflicting_change_is_reapplied_to_the_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shared store: the first attempt finds a newer version, and the next one starts from it."""
    rig = RepositoryRig(tmp_path)
    aborting = state_machine.abort(NEW_ROLLOUT, "carol", 4.0)
    async with rig.store.lock():
        await rig.repository.create(NEW_ROLLOUT)
        await rig.store.save_rollout(aborting, 1)  # by another writer
        original_save, versions = rig.store.save_rollout, list[int]()

        async def save(rollout: Rollout, version: int, term: int | None = None) -> int:
            versions.append(version)
            return await original_save(rollout, version, term)

        monkeypatch.setattr(rig.store, "save_rollout", save)
        with pytest.raises(RolloutRefused, match="it is aborting"):
            await rig.repository.change("r1", paused)
        assert versions == [1]
        assert rig.repository.get("r1").phase is RolloutPhase.ABORTING
        assert rig.changes[-1] == (NEW_ROLLOUT, rig.repository.get("r1"))


async def test_create_rejects_a_duplicate_id(tmp_path: Path) -> None:
    rig = RepositoryRig(tmp_path)
    async with rig.store.lock():
        await rig.repository.create(NEW_ROLLOUT)
        with pytest.raises(VersionConflict):
            await rig.repository.create(NEW_ROLLOUT)


async def test_accept_applies_only_newer_versions(tmp_path: Path) -> None:
    rig = RepositoryRig(tmp_path)
    first, second = NEW_ROLLOUT, paused(NEW_ROLLOUT)
    rig.repository.restore({"r1": Versioned(first, 7)})
    assert rig.changes == []
    rig.repository.accept({"r1": Versioned(second, 7)})
    assert rig.repository.get("r1") == first
    rig.repository.accept({"r1": Versioned(second, 8), "r2": Versioned(replace(NEW_ROLLOUT, id="r2"), 9)})
    assert rig.repository.get("r1").phase is RolloutPhase.PAUSED
    assert [after.id for _, after in rig.changes] == ["r1", "r2"]
    rig.repository.accept({"r1": Versioned(first, 7)})
    assert rig.repository.get("r2").id == "r2", "an older view of the store does not delete it"
    ended = replace(second, phase=RolloutPhase.ABORTED)
    rig.repository.accept({"r1": Versioned(ended, 10)})
    rig.repository.accept({})
    assert [rollout.id for rollout in rig.repository.all()] == ["r2"]


async def test_forget_old_deletes_the_oldest_ended_rollouts(tmp_path: Path) -> None:
    rig = RepositoryRig(tmp_path)
    async with rig.store.lock():
        for number in range(25):
            phase = RolloutPhase.RUNNING if number == 0 else RolloutPhase.DONE
            await rig.repository.create(
                replace(NEW_ROLLOUT, id=f"r{number}", created=float(number), phase=phase)
            )
        await rig.repository.forget_old()
        remaining = [f"r{number}" for number in (*range(24, 4, -1), 0)]
        assert [rollout.id for rollout in rig.repository.all()] == remaining
        assert sorted(await rig.stored()) == sorted(remaining)
        assert [rollout.id for rollout in rig.repository.active()] == ["r0"]


async def test_unavailable_store_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RepositoryRig(tmp_path)
    async with rig.store.lock():
        await rig.repository.create(NEW_ROLLOUT)
        await rig.store.save_rollout(state_machine.abort(NEW_ROLLOUT, "carol", 4.0), 1)  # by another writer

        async def fail_read(*_: object) -> None:
            raise StateUnavailable("PD", "it does not answer")

        monkeypatch.setattr(rig.store, "read_rollout", fail_read)
        with pytest.raises(StateUnavailable):
            await rig.repository.change("r1", paused)
        assert rig.repository.get("r1") == NEW_ROLLOUT
