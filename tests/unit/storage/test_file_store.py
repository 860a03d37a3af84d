"""Saved values load unchanged, or are reported and moved aside; they are never lost silently."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import errno
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
from structlog.testing import capture_logs

from controlplane.errors import ConfigError, StateUnavailable, VersionConflict
from controlplane.intents.repository import IntentRepository
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import SavedPlan, Versioned
from tests.support.controlplane.running_xds import RecordedEvents

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
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    store = FileStore(tmp_path / "state")
    async with store.lock():
        yield store


async def save_intents(store: FileStore, intents: Intents) -> int:
    return await store.save_intents(intents, (await store.read_intents()).version)


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type. It fills all fields of dataclasses, even fields added later."""
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
def test_saved_values_round_trip(intents: Intents, saved: SavedPlan) -> None:
    async def round_trip(path: Path) -> None:
        async with (store := FileStore(path)).lock():
            await save_intents(store, intents)
            await store.save_plan(saved)
            stored = await FileStore(path).load()
        assert (stored.intents.value, stored.plan, stored.load_errors) == (intents, saved, ())

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(round_trip(Path(path)))


async def test_empty_directory_loads_nothing(store: FileStore) -> None:
    stored = await store.load()
    assert (stored.intents.value, stored.plan, stored.load_errors) == (Intents(), None, ())


async def test_text_without_utf8_form_keeps_file_valid(store: FileStore) -> None:
    await save_intents(store, Intents(labels={"a:1": {"zone": "\ud800"}}))
    stored = await store.load()
    assert (stored.intents.value.labels, stored.load_errors) == ({"a:1": {"zone": "?"}}, ())


async def test_files_are_readable_by_owner_only(store: FileStore) -> None:
    await save_intents(store, INTENTS)
    assert (store.path / "intents.json").stat().st_mode & 0o777 == 0o600
    assert store.path.stat().st_mode & 0o777 == 0o700


# --- damaged files ---


def encode_file(content: Any, **head: Any) -> bytes:
    """Return the bytes of a file with this content and a valid checksum."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    default_head = {"tidevoy": "intents", "version": 1, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps({**default_head, **head, "content": content}).encode()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "it is not JSON, so it is truncated or was not written by Tidevoy"),
        (b"\0" * 4096, "it is not JSON, so it is truncated or was not written by Tidevoy"),
        (b"\xff\xfe\x00", "it is not JSON, so it is truncated or was not written by Tidevoy"),
        (b"[" * 100_000, "it is not JSON, so it is truncated or was not written by Tidevoy"),
        (b"[]", "it does not contain Tidevoy's intents"),
        (b'{"added": {}}', "it does not contain Tidevoy's intents"),
        (encode_file({}, tidevoy="plan"), "it does not contain Tidevoy's intents"),
        (encode_file({}, version=0), "it has format 0, and this Tidevoy reads 1"),
        (encode_file({}, sha256="0"), "its checksum does not match, so it is damaged or was edited"),
    ],
)
async def test_moves_damaged_file_aside(raw: bytes, problem: str, store: FileStore) -> None:
    file = store.path / "intents.json"
    file.write_bytes(raw)
    stored = await store.load()
    (aside,) = store.path.glob("intents.json.damaged-*")
    assert stored.load_errors == (f"{file} is unusable, because {problem}; it was moved to {aside}",)
    assert (stored.intents.value, aside.read_bytes(), file.exists()) == (Intents(), raw, False)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (encode_file({}, version=2), "it has format 2, and this Tidevoy reads 1"),
        (encode_file({"rollouts": {}}), "a newer Tidevoy wrote fields to it that this version does not know"),
        (
            encode_file({"drains": {"a:1": {"since": 1, "deadline_seconds": 2, "problem": "x"}}}),
            "a newer Tidevoy wrote fields to it that this version does not know",
        ),
        # The checksum is right, so these are not damaged.
        (
            encode_file({"weights": {"a:1": "heavy"}}),
            "another Tidevoy wrote a value that this version does not know, at weights.a:1",
        ),
        (
            encode_file([]),
            "another Tidevoy wrote a value that this version does not know, at the top level",
        ),
        (
            encode_file({"rollouts": {}, "weights": {"a:1": "heavy"}}),
            "a newer Tidevoy wrote fields to it that this version does not know",
        ),
    ],
)
async def test_refuses_file_of_a_newer_version(raw: bytes, problem: str, store: FileStore) -> None:
    file = store.path / "intents.json"
    file.write_bytes(raw)
    with pytest.raises(ConfigError) as raised:
        await store.load()
    assert f"intents.json is unusable, because {problem}; run the newer Tidevoy" in str(raised.value)
    assert (file.read_bytes(), [*store.path.glob("*.damaged-*")]) == (raw, [])
    # A replica has the intents in PD, too.
    stored = await FileStore(store.path, is_copy=True).load()
    (aside,) = store.path.glob("intents.json.damaged-*")
    assert stored.load_errors == (f"{file} is unusable, because {problem}; it was moved to {aside}",)


async def test_damaged_files_do_not_overwrite_each_other(store: FileStore) -> None:
    for number in range(3):
        (store.path / "intents.json").write_bytes(b"%d torn" % number)
        await store.load()
    contents = {path.read_bytes() for path in store.path.glob("intents.json.damaged-*")}
    assert contents == {b"0 torn", b"1 torn", b"2 torn"}


async def test_damaged_file_does_not_affect_the_other(store: FileStore) -> None:
    await save_intents(store, INTENTS)
    await store.save_plan(PLAN)
    (store.path / "plan.json").write_bytes((store.path / "plan.json").read_bytes()[:-40])
    stored = await store.load()
    assert (stored.intents.value, stored.plan, len(stored.load_errors)) == (INTENTS, None, 1)


async def test_older_file_may_lack_newer_fields(store: FileStore) -> None:
    (store.path / "intents.json").write_bytes(encode_file({"weights": {"a:1": 5}}))
    assert (await store.load()).intents.value == Intents(weights={"a:1": 5})


@settings(max_examples=60)
@given(st.data())
def test_detects_every_damaged_file(data: st.DataObject) -> None:
    async def damage(path: Path) -> None:
        async with (store := FileStore(path)).lock():
            await save_intents(store, INTENTS)
            file = path / "intents.json"
            raw = bytearray(file.read_bytes())
            if data.draw(st.booleans(), "truncate"):
                del raw[data.draw(st.integers(0, len(raw) - 2), "length") :]
            else:
                position = data.draw(st.integers(0, len(raw) - 1), "at")
                raw[position] ^= 1 << data.draw(st.integers(0, 7), "bit")
            file.write_bytes(raw)
            stored = await store.load()
        assert stored.intents.value == (Intents() if stored.load_errors else INTENTS)

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(damage(Path(path)))


async def test_unreadable_file_stops_start(store: FileStore) -> None:
    (store.path / "intents.json").mkdir()
    with pytest.raises(ConfigError, match=r"state_dir: .*intents\.json cannot be read: Is a directory; give"):
        await store.load()


# --- failed writes ---


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Limit all files of this process to `max_bytes` bytes: the kernel rejects larger writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_full_disk_keeps_old_intents(store: FileStore) -> None:
    await save_intents(store, INTENTS)
    with (
        full_disk(10),
        pytest.raises(StateUnavailable, match=r"nothing was changed.*intents\.json.*: File too"),
    ):
        await save_intents(store, Intents())
    assert (await store.load()).intents.value == INTENTS
    assert sorted(path.name for path in store.path.iterdir()) == ["intents.json", "lock"]
    await save_intents(store, Intents())
    assert (await store.load()).intents.value == Intents()


async def test_failed_write_keeps_old_plan(store: FileStore) -> None:
    await store.save_plan(PLAN)
    with full_disk(10), pytest.raises(StateUnavailable, match=r"plan\.json.*: File too large"):
        await store.save_plan(SavedPlan(Plan()))
    assert (await store.load()).plan == PLAN


async def test_outcome_is_unknown_if_the_directory_is_not_synced(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is already in place, so its intents are in force."""
    repository = IntentRepository(store, RecordedEvents())
    repository.restore(await store.read_intents())

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("controlplane.storage.atomic_file._sync_directory", fail)
        with pytest.raises(
            StateUnavailable, match=r"may or may not have been written \(Input/output"
        ) as error:
            await repository.change(lambda intents: INTENTS)
        assert not error.value.is_certain
    assert repository.current == (await store.load()).intents.value == INTENTS
    await repository.change(lambda intents: Intents())
    assert (await store.load()).intents.value == Intents()


async def test_one_of_concurrent_writes_of_a_version_wins(store: FileStore) -> None:
    versions = [Intents(weights={"a:1": number}) for number in range(1, 21)]
    outcomes = await asyncio.gather(
        *(store.save_intents(intents, 0) for intents in versions), return_exceptions=True
    )
    assert [outcome for outcome in outcomes if not isinstance(outcome, VersionConflict)] == [1]
    assert (await store.load()).intents == Versioned(versions[0], 1)


async def test_cancelled_write_completes_before_next(store: FileStore) -> None:
    write = asyncio.create_task(save_intents(store, INTENTS))
    await asyncio.sleep(0)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    assert (await store.load()).intents.value == INTENTS
    await save_intents(store, Intents())
    assert (await store.load()).intents.value == Intents()


async def test_failed_cancelled_write_raises_cancellation_and_is_logged(store: FileStore) -> None:
    with full_disk(10), capture_logs() as logs:
        write = asyncio.create_task(save_intents(store, INTENTS))
        await asyncio.sleep(0)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
    assert ["intents.json could not be written: File too large" in entry["error"] for entry in logs] == [True]
    assert (await store.load()).intents.value == Intents()


# --- the directory ---


async def test_directory_is_locked_by_one_control_plane(store: FileStore) -> None:
    with pytest.raises(
        ConfigError, match=rf"process id {os.getpid()} uses it \(lock file .*/lock\); stop that one"
    ):
        async with FileStore(store.path).lock():
            pytest.fail("two control planes locked the directory")


async def test_unlocks_directory(tmp_path: Path) -> None:
    for _ in range(2):
        async with FileStore(tmp_path / "a" / "b").lock():
            pass


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file", "it is not a directory"),
        ("file/state", "file/state cannot be created: Not a directory"),
        ("/proc/state", "/proc/state cannot be created: No such file or directory"),
    ],
)
async def test_rejects_invalid_directory(path: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        async with FileStore(tmp_path / path).lock():
            pytest.fail("locked an invalid directory")
    assert error.value.key == "state_dir"
    assert error.value.problem.endswith(problem)
