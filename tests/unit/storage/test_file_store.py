"""What is kept on disk comes back as it was, or is reported and kept aside; it is never silently lost."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import json
import os
import resource
import tempfile
import types
import typing
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.errors import ConfigError, StateUnavailable, VersionConflict
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.rollout import Stage, Step
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import SavedPlan, Versioned
from tests.support.controlplane.rollout_simulator import rollout_spec, rollout_with_steps

INTENTS = Intents(
    drains={"tidb-0:4000": DrainIntent(since=1.5, deadline_seconds=600.0)},
    weights={"tidb-1:4000": 7},
    labels={"tidb-1:4000": {"zone": "ü"}},
)
PLAN = SavedPlan(
    Plan(nodes={"a:1": NodePlan(Node("a:1", Source.PD), State.ACTIVE, "it passes its checks", 2.0)}),
    envoys={"envoy-1": 3.0},
)


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[FileStore]:
    directory = FileStore(tmp_path / "state")
    async with directory.lock():
        yield directory


async def keep(directory: FileStore, intents: Intents) -> int:
    """Write intents over those that are there."""
    return await directory.save_intents(intents, (await directory.read_intents()).version)


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, with every field of a dataclass filled, those that are added later too."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of([any_value(one) for one in arguments])
    if typing.get_origin(hint) is not None and issubclass(typing.get_origin(hint), Mapping):
        return st.dictionaries(any_value(arguments[0]), any_value(arguments[1]), max_size=3)
    if typing.get_origin(hint) is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(any_value, arguments))
    if typing.get_origin(hint) in (tuple, frozenset):
        return st.lists(any_value(arguments[0]), max_size=3).map(typing.get_origin(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(
            hint, **{field.name: any_value(hints[field.name]) for field in dataclasses.fields(hint)}
        )
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        int: st.integers(),
        str: st.text(max_size=8),
        type(None): st.none(),
    }
    return scalars[hint]


@settings(max_examples=50)
@given(any_value(Intents), any_value(SavedPlan))
def test_everything_comes_back_as_it_was(intents: Intents, saved: SavedPlan) -> None:
    async def there_and_back(path: Path) -> None:
        async with (directory := FileStore(path)).lock():
            await keep(directory, intents)
            await directory.save_plan(saved)
            stored = await FileStore(path).load()
        assert (stored.intents.value, stored.plan, stored.load_errors) == (intents, saved, ())

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(there_and_back(Path(path)))


async def test_an_empty_directory_holds_nothing(directory: FileStore) -> None:
    stored = await directory.load()
    assert (stored.intents.value, stored.plan, stored.load_errors) == (Intents(), None, ())


async def test_a_text_without_utf8_form_does_not_spoil_the_file(directory: FileStore) -> None:
    await keep(directory, Intents(labels={"a:1": {"zone": "\ud800"}}))
    stored = await directory.load()
    assert (stored.intents.value.labels, stored.load_errors) == ({"a:1": {"zone": "?"}}, ())


async def test_only_the_owner_may_read(directory: FileStore) -> None:
    await keep(directory, INTENTS)
    assert (directory.path / "intents.json").stat().st_mode & 0o777 == 0o600
    assert directory.path.stat().st_mode & 0o777 == 0o700


# --- damage ---


def file_of(content: Any, **head: Any) -> bytes:
    """The file of some content, with a checksum that is right."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    whole = {"tidevoy": "intents", "version": 2, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps({**whole, **head, "content": content}).encode()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "it is not JSON, so it is torn or was not written by Tidevoy"),
        (b"\0" * 4096, "it is not JSON, so it is torn or was not written by Tidevoy"),
        (b"\xff\xfe\x00", "it is not JSON, so it is torn or was not written by Tidevoy"),
        (b"[" * 100_000, "it is not JSON, so it is torn or was not written by Tidevoy"),
        (b"[]", "it does not hold intents of Tidevoy"),
        (b'{"added": {}}', "it does not hold intents of Tidevoy"),
        (file_of({}, tidevoy="plan"), "it does not hold intents of Tidevoy"),
        (file_of({}, version=3), "it has format 3, and this Tidevoy reads 2"),
        (file_of({}, sha256="0"), "its checksum does not match, so it is torn or was edited"),
        (file_of({"weights": {"a:1": "heavy"}}), "weights.a:1 in it has no valid value"),
        (file_of([]), " in it has no valid value"),
        (file_of({"rollouts": {}}), "a newer Tidevoy wrote things to it that this one does not know"),
        (
            file_of({"drains": {"a:1": {"since": 1, "deadline_seconds": 2, "why": "x"}}}),
            "a newer Tidevoy wrote things to it that this one does not know",
        ),
    ],
)
async def test_what_cannot_be_used_is_kept_aside(raw: bytes, why: str, directory: FileStore) -> None:
    file = directory.path / "intents.json"
    file.write_bytes(raw)
    stored = await directory.load()
    (aside,) = directory.path.glob("intents.json.damaged-*")
    assert stored.load_errors == (f"{file} could not be used, because {why}; it is kept as {aside}",)
    assert (stored.intents.value, aside.read_bytes(), file.exists()) == (Intents(), raw, False)


async def test_damaged_files_do_not_replace_each_other(directory: FileStore) -> None:
    for number in range(3):
        (directory.path / "intents.json").write_bytes(b"%d torn" % number)
        await directory.load()
    kept = {path.read_bytes() for path in directory.path.glob("intents.json.damaged-*")}
    assert kept == {b"0 torn", b"1 torn", b"2 torn"}


async def test_one_damaged_file_does_not_touch_the_other(directory: FileStore) -> None:
    await keep(directory, INTENTS)
    await directory.save_plan(PLAN)
    (directory.path / "plan.json").write_bytes((directory.path / "plan.json").read_bytes()[:-40])
    stored = await directory.load()
    assert (stored.intents.value, stored.plan, len(stored.load_errors)) == (INTENTS, None, 1)


async def test_an_older_file_lacks_what_came_later(directory: FileStore) -> None:
    (directory.path / "intents.json").write_bytes(file_of({"weights": {"a:1": 5}}))
    assert (await directory.load()).intents.value == Intents(weights={"a:1": 5})


async def test_intents_of_format_1_are_read(directory: FileStore) -> None:
    content = {
        "ended": {"envoy-1": 5.0},
        "drains": {"a:1": {"since": 1.0, "deadline_seconds": 2.0, "by": "r1"}},
    }
    (directory.path / "intents.json").write_bytes(file_of(content, version=1))
    stored = await directory.load()
    assert stored.load_errors == ()
    assert stored.intents.value == Intents(
        ended_envoys={"envoy-1": 5.0}, drains={"a:1": DrainIntent(1.0, 2.0, owner="r1")}
    )


@pytest.mark.parametrize("version", [1, 2])
async def test_a_plan_of_an_older_format_is_read_without_its_round(
    directory: FileStore, version: int
) -> None:
    await directory.save_plan(PLAN)
    file = directory.path / "plan.json"
    content = json.loads(file.read_bytes())["content"]
    plan = content["plan"]
    for new, old in (
        ("panic_threshold_reason", "floor"),
        ("weights_computed_at", "weighed_at"),
        ("overloaded_zones", "full"),
    ):
        plan[old] = plan.pop(new)
    for node in plan["nodes"].values():
        for new, old in (
            ("eds_health", "advice"),
            ("removal_since", "leaving_since"),
            ("terminate_sessions", "closing"),
        ):
            node[old] = node.pop(new)
    plan["rebalance"] = {"round": 7, "until": 3.5, "moves": {"a:1": {"00aa": 5}}, "wants": ["b:1"]}
    file.write_bytes(file_of(content, tidevoy="plan", version=version))
    stored = await directory.load()
    expected = dataclasses.replace(PLAN.plan, rebalance=RebalanceState(round=7, round_ends_at=3.5))
    assert (stored.plan, stored.load_errors) == (dataclasses.replace(PLAN, plan=expected), ())


async def test_rollouts_of_format_1_are_read(directory: FileStore) -> None:
    rollout = rollout_with_steps(
        rollout_spec("a:1"), Step("a:1", Stage.DRAINING, "a reason", drain_requested_at=5.0)
    )
    await directory.save_rollout(rollout, 0)
    file = directory.path / "rollouts.json"
    content = json.loads(file.read_bytes())["content"]
    for rollout in content["rollouts"].values():
        rollout["order"] = rollout.pop("spec")
        for step in rollout["steps"].values():
            step["begun"], step["cut_off"] = step.pop("drain_requested_at"), step.pop("interrupted")
    file.write_bytes(file_of(content, tidevoy="rollouts", version=1))
    stored = await directory.load()
    assert stored.load_errors == ()
    assert [each.value for each in stored.rollouts.values()] == [rollout]


@pytest.mark.parametrize("strange", [[], {"plan": None}, {"plan": {"rebalance": 5}}])
async def test_an_older_plan_of_another_shape_is_not_read(directory: FileStore, strange: Any) -> None:
    (directory.path / "plan.json").write_bytes(file_of(strange, tidevoy="plan", version=1))
    stored = await directory.load()
    assert (stored.plan, len(stored.load_errors)) == (None, 1)


@settings(max_examples=60)
@given(st.data())
def test_no_torn_file_passes_for_another_one(data: st.DataObject) -> None:
    async def tear(path: Path) -> None:
        async with (directory := FileStore(path)).lock():
            await keep(directory, INTENTS)
            file = path / "intents.json"
            raw = bytearray(file.read_bytes())
            if data.draw(st.booleans(), "truncate"):
                del raw[data.draw(st.integers(0, len(raw) - 2), "length") :]
            else:
                at = data.draw(st.integers(0, len(raw) - 1), "at")
                raw[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
            file.write_bytes(raw)
            stored = await directory.load()
        assert stored.intents.value == (Intents() if stored.load_errors else INTENTS)

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(tear(Path(path)))


async def test_what_cannot_even_be_read_stops_the_start(directory: FileStore) -> None:
    (directory.path / "intents.json").mkdir()
    with pytest.raises(ConfigError, match=r"state_dir: .*intents\.json cannot be read: Is a directory; give"):
        await directory.load()


# --- writes that fail ---


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process may grow beyond `room` bytes: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_leaves_the_old_intents(directory: FileStore) -> None:
    await keep(directory, INTENTS)
    with (
        full_disk(10),
        pytest.raises(StateUnavailable, match=r"nothing was changed.*intents\.json.*: File too"),
    ):
        await keep(directory, Intents())
    assert (await directory.load()).intents.value == INTENTS
    assert sorted(path.name for path in directory.path.iterdir()) == ["intents.json", "lock"]
    await keep(directory, Intents())
    assert (await directory.load()).intents.value == Intents()


async def test_a_plan_that_cannot_be_written_leaves_the_old_one(directory: FileStore) -> None:
    await directory.save_plan(PLAN)
    with full_disk(10), pytest.raises(StateUnavailable, match=r"plan\.json.*: File too large"):
        await directory.save_plan(SavedPlan(Plan()))
    assert (await directory.load()).plan == PLAN


async def test_of_writes_side_by_side_over_one_version_one_is_kept(directory: FileStore) -> None:
    versions = [Intents(weights={"a:1": number}) for number in range(1, 21)]
    outcomes = await asyncio.gather(
        *(directory.save_intents(intents, 0) for intents in versions), return_exceptions=True
    )
    assert [outcome for outcome in outcomes if not isinstance(outcome, VersionConflict)] == [1]
    assert (await directory.load()).intents == Versioned(versions[0], 1)


async def test_a_cancelled_write_is_finished_before_the_next_begins(directory: FileStore) -> None:
    begun = asyncio.create_task(keep(directory, INTENTS))
    await asyncio.sleep(0)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert (await directory.load()).intents.value == INTENTS
    await keep(directory, Intents())
    assert (await directory.load()).intents.value == Intents()


async def test_a_failed_write_that_was_cancelled_is_cancelled(directory: FileStore) -> None:
    with full_disk(10):
        begun = asyncio.create_task(keep(directory, INTENTS))
        await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
    assert (await directory.load()).intents.value == Intents()


# --- the directory ---


async def test_one_directory_serves_one_control_plane(directory: FileStore) -> None:
    with pytest.raises(
        ConfigError, match=rf"process id {os.getpid()} uses it \(lock file .*/lock\); stop that one"
    ):
        async with FileStore(directory.path).lock():
            pytest.fail("the directory is held by two")


async def test_a_directory_is_free_again_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        async with FileStore(tmp_path / "a" / "b").lock():
            pass


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "it is not a directory"),
        ("file/state", "file/state cannot be created: Not a directory"),
        ("/proc/state", "/proc/state cannot be created: No such file or directory"),
    ],
)
async def test_a_directory_that_cannot_be(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refusal:
        async with FileStore(tmp_path / path).lock():
            pytest.fail("there is no such directory")
    assert refusal.value.key == "state_dir"
    assert refusal.value.problem.endswith(why)
