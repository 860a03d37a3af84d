"""The store that all replicas share in PD. Writes check versions; a leader's writes also check its term.

The mirror is this replica's copy of all keys, which a watch keeps current.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from controlplane.errors import (
    ConfigError,
    NotLeader,
    OutcomeUnknown,
    PdError,
    StateUnavailable,
    VersionConflict,
)
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry
from controlplane.model.intents import Intents
from controlplane.model.rollout import Rollout
from controlplane.storage.atomic_file import STORAGE_THREADS
from controlplane.storage.etcd_keys import EtcdKeys
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.file_formats import INTENTS_CODEC, PLAN_CODEC, ROLLOUT_CODEC
from controlplane.storage.file_store import FileStore
from controlplane.storage.restored_state import sort_steps
from controlplane.storage.store import LoadedState, SavedPlan, Versioned, compare_and_set
from controlplane.storage.versioned_codec import DecodeError, VersionedCodec

T = TypeVar("T")

# Timeouts of a write, below 5 s in total. A write begins with a read, to check that PD answers at all. So
# writes without a response, which PD may apply much later, are rare.
_CHECK_TIMEOUT_SECONDS, _WRITE_TIMEOUT_SECONDS, _READ_BACK_TIMEOUT_SECONDS = 1.8, 2.0, 1.0
_MAX_VALUE_BYTES = 1_400_000  # etcd and PD accept 1.5 MiB per request by default
_MAX_DECOMPRESSED_BYTES = 1 << 26
# Values up to this size are written as plain JSON, readable with etcdctl; larger ones are compressed. PD
# keeps each revision for an hour: a rollout of 2,000 nodes has 900 KB, and its revisions would fill PD.
_MAX_UNCOMPRESSED_BYTES = 16_384


class EtcdStore:
    """A `Store` in PD, with a local copy of what is needed to start without PD."""

    def __init__(
        self, client: EtcdClient, keys: EtcdKeys, mirror: EtcdMirror, local_store: FileStore, instance: str
    ) -> None:
        """`instance` changes with each start of a control plane."""
        self.client, self.keys, self.mirror = client, keys, mirror
        self._local_store = local_store
        self._instance = instance
        self._write_numbers = itertools.count(1)
        self._intents = _CachedKey("intents", INTENTS_CODEC)
        self._plan = _CachedKey("the plan", PLAN_CODEC)
        self._rollouts: dict[str, _CachedKey[Rollout]] = {}
        self._plan_revision = 0  # of the plan that was last read or written
        self._loaded: LoadedState | None = None
        self._loaded_revisions: tuple[int, ...] = ()  # revisions of the keys in `_loaded`

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Open connections to PD, and lock the local directory. Raises ConfigError."""
        async with self._local_store.lock(), self.client:
            yield

    async def load(self) -> LoadedState:
        """Load the state from PD, or the last known state from the local copy if PD does not answer.

        Raises ConfigError if the intents are unreadable in PD and there is no local copy.
        """
        local = await self._local_store.load()
        try:
            await self.mirror.load()
        except PdError:
            return LoadedState(
                Versioned(local.intents.value), _without_term(local.plan), load_errors=local.load_errors
            )
        shared = await self.refresh(self.mirror.entries)
        if self._intents.load_error and not local.intents.version:
            raise ConfigError(
                f"{self.keys.intents} in PD",
                "",
                f"it is unusable, because {self._intents.load_error}",
                f"run the newer Tidevoy here too, or delete it with `etcdctl del {self.keys.intents}`",
            )
        intents = shared.intents
        if not intents.version:
            # PD has no intents yet, or they are unreadable: the local intents stay in force.
            intents = Versioned(local.intents.value)
            if not self._intents.load_error and local.intents.version:
                intents = await self._import_local(local.intents.value)
        plan = shared.plan or _without_term(local.plan)
        return LoadedState(intents, plan, shared.rollouts, (*local.load_errors, *shared.load_errors))

    async def refresh(self, entries: Mapping[str, Entry]) -> LoadedState:
        """Return the state in these entries; the same object as before if nothing has changed.

        An unreadable value is reported in `load_errors`, and the last readable one is used instead.
        """
        await self._intents.refresh(entries.get(self.keys.intents))
        await self._plan.refresh(entries.get(self.keys.plan))
        if not self._plan.load_error:
            self._plan_revision = max(self._plan_revision, self._plan.revision)
        rollout_entries = {key: entry for key, entry in entries.items() if key.startswith(self.keys.rollouts)}
        for key in self._rollouts.keys() - rollout_entries.keys():
            del self._rollouts[key]
        for key, entry in rollout_entries.items():
            name = key.removeprefix(self.keys.rollouts)
            await self._rollouts.setdefault(key, _CachedKey(f"the rollout {name}", ROLLOUT_CODEC)).refresh(
                entry
            )
        cached_keys: list[_CachedKey[Any]] = [self._intents, self._plan, *self._rollouts.values()]
        revisions = tuple(cached.revision for cached in cached_keys)
        if self._loaded is None or revisions != self._loaded_revisions:
            self._loaded_revisions, self._loaded = revisions, self._build_state(cached_keys)
        return self._loaded

    def _build_state(self, cached_keys: Sequence[_CachedKey[Any]]) -> LoadedState:
        return LoadedState(
            intents=Versioned(self._intents.value or Intents(), self._intents.version),
            plan=self._plan.value,
            rollouts=MappingProxyType(
                {
                    key.removeprefix(self.keys.rollouts): Versioned(sort_steps(cached.value), cached.version)
                    for key, cached in self._rollouts.items()
                    if cached.value is not None
                }
            ),
            load_errors=tuple(
                f"{cached.label} in PD (revision {cached.revision}): unusable, because {cached.load_error};"
                " the last readable version stays in force"
                for cached in cached_keys
                if cached.load_error
            ),
        )

    @property
    def is_readable(self) -> bool:
        """Whether plan and intents in PD are readable; if not, this replica must not lead."""
        return not self._plan.load_error and not self._intents.load_error

    async def read_intents(self) -> Versioned[Intents]:
        return await self._read_value(self.keys.intents, INTENTS_CODEC) or Versioned(Intents())

    async def save_intents(self, intents: Intents, version: int) -> int:
        raw = await self._encode(self.keys.intents, INTENTS_CODEC, intents)
        return await self._write(self.keys.intents, raw, version)

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        stored = await self._read_value(self.keys.rollout(name), ROLLOUT_CODEC)
        return Versioned(sort_steps(stored.value), stored.version) if stored is not None else None

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        key = self.keys.rollout(rollout.id)
        return await self._write(key, await self._encode(key, ROLLOUT_CODEC, rollout), version, term)

    async def delete_rollout(self, name: str, version: int) -> None:
        await self._write(self.keys.rollout(name), None, version)

    async def save_plan(self, saved: SavedPlan) -> None:
        key = self.keys.plan
        raw = await self._encode(key, PLAN_CODEC, saved)
        self._plan.expect_write(raw, saved)

        async def write() -> None:
            self._plan_revision = await self._write(
                key, raw, self._plan_revision, saved.term, is_checked=False
            )

        async def reload() -> None:
            # This replica still leads, so an operator deleted or replaced the plan in PD. Read the plan
            # before overwriting it.
            stored = await self._read_value(key, PLAN_CODEC)
            self._plan_revision = stored.version if stored is not None else 0

        await compare_and_set(write, reload)
        self._plan.confirm_write(saved, self._plan_revision)

    async def _import_local(self, intents: Intents) -> Versioned[Intents]:
        """Copy the local intents to PD, unless another replica has written intents there first."""
        try:
            return Versioned(intents, await self.save_intents(intents, 0))
        except VersionConflict:
            return await self.read_intents()
        except StateUnavailable:
            return Versioned(intents)

    async def _encode(self, key: str, codec: VersionedCodec[T], value: T) -> bytes:
        """Return the bytes to write. Raises StateUnavailable if they exceed PD's limit."""
        # The writer makes each write unique, so that `_read_back` recognizes it.
        writer = f"{self._instance}/{next(self._write_numbers)}"
        raw = await STORAGE_THREADS.run(codec.encode, value, writer)
        if len(raw) > _MAX_UNCOMPRESSED_BYTES:
            raw = await STORAGE_THREADS.run(zlib.compress, raw, 1)
        if len(raw) > _MAX_VALUE_BYTES:
            raise StateUnavailable(
                _describe(key), f"it has {len(raw)} bytes, and PD accepts at most {_MAX_VALUE_BYTES}"
            )
        return raw

    async def _read_value(self, key: str, codec: VersionedCodec[T]) -> Versioned[T] | None:
        """Return a key's current value in PD. Raises StateUnavailable, also if the value is unreadable."""
        entry = await self._read(key, _CHECK_TIMEOUT_SECONDS)
        if entry is None:
            return None
        try:
            return Versioned(await _decode(codec, entry.value), entry.mod_revision)
        except DecodeError as unusable:
            raise StateUnavailable(
                _describe(key),
                f"its content must not be overwritten, because {unusable}; run the newer Tidevoy here too,"
                f" or delete it with `etcdctl del {key}`",
            ) from None

    async def _read(self, key: str, within: float) -> Entry | None:
        try:
            return await self.client.get(key, within=within)
        except PdError as error:
            raise _unavailable(key, error) from error

    async def _write(
        self, key: str, raw: bytes | None, version: int, term: int | None = None, *, is_checked: bool = True
    ) -> int:
        """Replace this version of a key, or delete it if `raw` is None; return the revision of the write.

        Raises StateUnavailable, VersionConflict or NotLeader. With `is_checked`, first check that PD answers.
        """
        expect = {key: version}
        if term is not None:
            expect[self.keys.leader] = term
        puts, deletes = ({key: raw}, ()) if raw is not None else ({}, (key,))
        try:
            if is_checked:  # any key would do; this one is small
                await self.client.get(self.keys.leader, within=_CHECK_TIMEOUT_SECONDS)
            revision = await self.client.txn(
                expect, puts=puts, deletes=deletes, within=_WRITE_TIMEOUT_SECONDS
            )
        except OutcomeUnknown as error:
            return await self._read_back(key, raw, version, error)
        except PdError as error:
            raise _unavailable(key, error) from error
        if revision is not None:
            return revision
        if term is not None:
            leader = await self._read(self.keys.leader, _READ_BACK_TIMEOUT_SECONDS)
            if leader is None or leader.mod_revision != term:
                raise NotLeader(f"writing {key} in PD")
        raise VersionConflict(_describe(key))

    async def _read_back(self, key: str, raw: bytes | None, version: int, error: OutcomeUnknown) -> int:
        """Return the revision of a write with unknown outcome if it was applied.

        Raises VersionConflict if another write came first, StateUnavailable if the outcome stays unknown.
        """
        try:
            entry = await self.client.get(key, within=_READ_BACK_TIMEOUT_SECONDS)
        except PdError:
            raise _unavailable(key, error) from error
        revision, value = (entry.mod_revision, entry.value) if entry is not None else (0, None)
        if value == raw:
            return revision
        if revision == version:  # not applied yet; the request may still be on its way
            raise _unavailable(key, error) from error
        raise VersionConflict(_describe(key))


class _CachedKey(Generic[T]):
    """The last read state of one key; each version is decoded once."""

    def __init__(self, label: str, codec: VersionedCodec[T]) -> None:
        self.label = label
        self._codec = codec
        self.revision = 0  # of the key in PD
        self.version = 0  # revision of `value`
        self.value: T | None = None  # the last readable value
        self.load_error = ""
        self._own_write: tuple[bytes, T | None] = (b"", None)

    def expect_write(self, raw: bytes, value: T) -> None:
        """Remember a write that begins now: the mirror may deliver it before its response arrives."""
        self._own_write = (raw, value)

    def confirm_write(self, value: T, revision: int) -> None:
        """Record that this replica's own write was applied."""
        if revision > self.revision:
            self.revision, self.version, self.value, self.load_error = revision, revision, value, ""

    async def refresh(self, entry: Entry | None) -> None:
        if entry is None:
            if self.revision:
                self.revision, self.version, self.value, self.load_error = 0, 0, None, ""
            return
        if entry.mod_revision <= self.revision:
            return
        own_raw, own_value = self._own_write
        decoded, load_error = own_value if entry.value == own_raw else None, ""
        if decoded is None:
            try:
                decoded = await _decode(self._codec, entry.value)
            except DecodeError as unusable:
                load_error = str(unusable)
        if entry.mod_revision <= self.revision:
            return  # `confirm_write` was called meanwhile
        self.revision, self.load_error = entry.mod_revision, load_error
        if decoded is not None:
            self.value, self.version = decoded, entry.mod_revision


def _unavailable(key: str, error: PdError) -> StateUnavailable:
    is_certain = not isinstance(error, OutcomeUnknown)
    return StateUnavailable(_describe(key), str(error), is_certain=is_certain, retryable=error.retryable)


def _describe(key: str) -> str:
    return f"{key} in PD"


async def _decode(codec: VersionedCodec[T], raw: bytes) -> T:
    """Return the value in these bytes. Raises DecodeError."""
    try:
        plain = raw if raw[:1] == b"{" else await STORAGE_THREADS.run(_decompress, raw)
    except zlib.error:
        raise DecodeError("it is truncated or was not written by Tidevoy") from None
    return await STORAGE_THREADS.run(codec.decode, plain)


def _decompress(raw: bytes) -> bytes:
    """Decompress a value. Raises zlib.error, also if the value is longer than any that Tidevoy writes."""
    unzip = zlib.decompressobj()
    plain = unzip.decompress(raw, _MAX_DECOMPRESSED_BYTES)
    if not unzip.eof:
        raise zlib.error("truncated or too long")
    return plain


def _without_term(saved: SavedPlan | None) -> SavedPlan | None:
    """Return a local plan without term and serial, so that it never outranks the plan in PD."""
    return None if saved is None else SavedPlan(saved.plan, saved.envoys)
