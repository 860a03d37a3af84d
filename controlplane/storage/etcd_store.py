"""The store that all replicas share in PD: writes compare versions, and the leader's also its term."""

from __future__ import annotations

import asyncio
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
from controlplane.storage.clamp_timestamps import sort_steps
from controlplane.storage.etcd_keys import EtcdKeys
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.file_formats import INTENTS_CODEC, PLAN_CODEC, ROLLOUT_CODEC
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import LoadedState, SavedPlan, Versioned
from controlplane.storage.versioned_codec import DecodeError, VersionedCodec

T = TypeVar("T")

# Timeouts of a write. It begins with a read as a check that PD serves at all, so that a write without
# response, which may be applied much later, is rare. The sum is below 5 s.
_CHECK_TIMEOUT_SECONDS, _WRITE_TIMEOUT_SECONDS, _READ_BACK_TIMEOUT_SECONDS = 1.8, 2.0, 1.0
_MAX_VALUE_BYTES = 1_400_000  # etcd accepts requests of 1.5 MiB unless configured otherwise, as in PD
_MAX_DECOMPRESSED_BYTES = 1 << 26
# Values up to this size are written as plain JSON, readable with etcdctl; larger ones are compressed. PD
# keeps each revision for an hour: a rollout of 2,000 nodes has 900 KB, and its revisions would fill PD.
_MAX_UNCOMPRESSED_BYTES = 16_384


class EtcdStore:
    """A `Store` in PD, with a local copy of what is needed to start without PD."""

    is_shared = True

    def __init__(
        self, client: EtcdClient, keys: EtcdKeys, mirror: EtcdMirror, local_store: FileStore, instance: str
    ) -> None:
        """`instance` changes with each start of a control plane."""
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._local_store = local_store
        self._instance = instance
        self._write_numbers = itertools.count(1)
        self._intents = _CachedKey("intents", INTENTS_CODEC)
        self._plan = _CachedKey("the plan", PLAN_CODEC)
        self._rollouts: dict[str, _CachedKey[Rollout]] = {}
        self._plan_revision = 0  # of the plan read or written last
        self._loaded: LoadedState | None = None
        self._loaded_revisions: tuple[int, ...] = ()  # of the keys in it

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Open connections to PD, and lock the local directory. Raises ConfigError."""
        async with self._local_store.lock(), self._client:
            yield

    async def load(self) -> LoadedState:
        """Load the state from PD, or the last known state from the local copy if PD does not answer.

        Raises ConfigError if the intents are unreadable in PD and there is no local copy.
        """
        local = await self._local_store.load()
        try:
            await self._mirror.load()
        except PdError:
            return LoadedState(
                Versioned(local.intents.value), _without_term(local.plan), load_errors=local.load_errors
            )
        shared = await self.refresh(self._mirror.entries)
        if self._intents.load_error and not local.intents.version:
            raise ConfigError(
                f"{self._keys.intents} in PD",
                "",
                f"it is unusable, because {self._intents.load_error}",
                f"run the newer Tidevoy here too, or delete it with `etcdctl del {self._keys.intents}`",
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
        await self._intents.refresh(entries.get(self._keys.intents))
        await self._plan.refresh(entries.get(self._keys.plan))
        if self._plan.is_readable:
            self._plan_revision = max(self._plan_revision, self._plan.revision)
        rollout_entries = {
            key: entry for key, entry in entries.items() if key.startswith(self._keys.rollouts)
        }
        for key in self._rollouts.keys() - rollout_entries.keys():
            del self._rollouts[key]
        for key, entry in rollout_entries.items():
            name = key.removeprefix(self._keys.rollouts)
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
                    key.removeprefix(self._keys.rollouts): Versioned(sort_steps(cached.value), cached.version)
                    for key, cached in self._rollouts.items()
                    if cached.value is not None
                }
            ),
            load_errors=tuple(cached.describe_load_error() for cached in cached_keys if cached.load_error),
        )

    @property
    def is_readable(self) -> bool:
        """Whether plan and intents in PD are readable; without them this replica must not lead."""
        return self._plan.is_readable and self._intents.is_readable

    async def read_intents(self) -> Versioned[Intents]:
        """Return the intents that are in PD now. Raises StateUnavailable."""
        entry = await self._read(self._keys.intents, _CHECK_TIMEOUT_SECONDS)
        if entry is None:
            return Versioned(Intents())
        return Versioned(await self._decode(self._keys.intents, INTENTS_CODEC, entry), entry.mod_revision)

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Replace that version of the intents. Raises StateUnavailable or VersionConflict."""
        raw = await self._encode(self._keys.intents, INTENTS_CODEC, intents)
        await self._check_writable(self._keys.intents)
        return await self._write(self._keys.intents, raw, version)

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """Return the rollout with that id that is in PD now. Raises StateUnavailable."""
        key = self._keys.rollout(name)
        entry = await self._read(key, _CHECK_TIMEOUT_SECONDS)
        if entry is None:
            return None
        return Versioned(sort_steps(await self._decode(key, ROLLOUT_CODEC, entry)), entry.mod_revision)

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Replace that version of the rollout, with a `term` only while this replica leads in it.

        Raises StateUnavailable, VersionConflict or NotLeader.
        """
        key = self._keys.rollout(rollout.id)
        raw = await self._encode(key, ROLLOUT_CODEC, rollout)
        await self._check_writable(key)
        return await self._write(key, raw, version, term)

    async def forget_rollout(self, name: str, version: int) -> None:
        """Delete that version of the rollout. Raises StateUnavailable or VersionConflict."""
        key = self._keys.rollout(name)
        await self._check_writable(key)
        try:
            revision = await self._client.txn({key: version}, deletes=(key,), within=_WRITE_TIMEOUT_SECONDS)
        except PdError as error:
            raise StateUnavailable(
                _describe_key(key), str(error), is_certain=not isinstance(error, OutcomeUnknown)
            ) from error
        if revision is None:
            raise VersionConflict(f"the rollout {name}")

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the plan while this replica leads in `saved.term`. Raises NotLeader or StateUnavailable."""
        key = self._keys.plan
        raw = await self._encode(key, PLAN_CODEC, saved)
        self._plan.expect_write(raw, saved)
        try:
            self._plan_revision = await self._write(key, raw, self._plan_revision, saved.term)
        except VersionConflict:
            # This replica still leads, so somebody deleted or replaced the plan by hand. It is not
            # overwritten unread.
            entry = await self._read(key, _CHECK_TIMEOUT_SECONDS)
            if entry is not None:
                await self._decode(key, PLAN_CODEC, entry)
            self._plan_revision = entry.mod_revision if entry is not None else 0
            self._plan_revision = await self._write(key, raw, self._plan_revision, saved.term)
        self._plan.confirm_write(saved, self._plan_revision)

    async def _import_local(self, intents: Intents) -> Versioned[Intents]:
        """Copy the local intents to PD, unless another replica has written intents there first."""
        try:
            return Versioned(intents, await self.save_intents(intents, 0))
        except VersionConflict:
            return await self.read_intents()
        except StateUnavailable:
            return Versioned(intents)

    async def _check_writable(self, key: str) -> None:
        """Raise StateUnavailable if PD would not answer a write of that key."""
        try:
            # Any key is good enough for the check; this one is small.
            await self._client.get(self._keys.leader, within=_CHECK_TIMEOUT_SECONDS)
        except PdError as error:
            raise StateUnavailable(_describe_key(key), str(error)) from error

    async def _encode(self, key: str, codec: VersionedCodec[T], value: T) -> bytes:
        """Return the bytes to write. Raises StateUnavailable if they exceed PD's limit."""
        # The writer makes each write unique, so that `_read_back` recognizes it.
        writer = f"{self._instance}/{next(self._write_numbers)}"
        raw = await asyncio.to_thread(_encode_value, codec, value, writer)
        if len(raw) > _MAX_VALUE_BYTES:
            raise StateUnavailable(
                _describe_key(key), f"it has {len(raw)} bytes, and PD accepts at most {_MAX_VALUE_BYTES}"
            )
        return raw

    async def _decode(self, key: str, codec: VersionedCodec[T], entry: Entry) -> T:
        """Return the value of an entry. Raises StateUnavailable if unreadable: it must not be overwritten."""
        try:
            return await asyncio.to_thread(_decode_value, codec, entry.value)
        except DecodeError as unusable:
            raise StateUnavailable(
                _describe_key(key),
                f"its content must not be overwritten, because {unusable}; run the newer Tidevoy here too,"
                f" or delete it with `etcdctl del {key}`",
            ) from None

    async def _read(self, key: str, within: float) -> Entry | None:
        try:
            return await self._client.get(key, within=within)
        except PdError as error:
            raise StateUnavailable(_describe_key(key), str(error)) from error

    async def _write(self, key: str, raw: bytes, version: int, term: int | None = None) -> int:
        expect = {key: version}
        if term is not None:
            expect[self._keys.leader] = term
        try:
            revision = await self._client.txn(expect, puts={key: raw}, within=_WRITE_TIMEOUT_SECONDS)
        except OutcomeUnknown as error:
            return await self._read_back(key, raw, version, error)
        except PdError as error:
            raise StateUnavailable(_describe_key(key), str(error)) from error
        if revision is not None:
            return revision
        if term is not None:
            leader = await self._read(self._keys.leader, _READ_BACK_TIMEOUT_SECONDS)
            if leader is None or leader.mod_revision != term:
                raise NotLeader(f"writing {key} in PD")
        raise VersionConflict(_describe_key(key))

    async def _read_back(self, key: str, raw: bytes, version: int, error: OutcomeUnknown) -> int:
        """Return the revision of a write with unknown outcome if it was applied.

        Raises VersionConflict if another write came first, StateUnavailable if the outcome stays unknown.
        """
        try:
            entry = await self._client.get(key, within=_READ_BACK_TIMEOUT_SECONDS)
        except PdError:
            raise StateUnavailable(_describe_key(key), str(error), is_certain=False) from error
        if entry is not None and entry.value == raw:
            return entry.mod_revision
        if (entry.mod_revision if entry is not None else 0) == version:
            # Not applied yet; the request may still be on its way.
            raise StateUnavailable(_describe_key(key), str(error), is_certain=False) from error
        raise VersionConflict(_describe_key(key))


class _CachedKey(Generic[T]):
    """One key as it was read last; each version is decoded once."""

    def __init__(self, label: str, codec: VersionedCodec[T]) -> None:
        self._label = label
        self._codec = codec
        self.revision = 0  # of the key in PD
        self.version = 0  # revision of `value`
        self.value: T | None = None  # the last readable value
        self.load_error = ""
        self._own_write: tuple[bytes, T | None] = (b"", None)

    @property
    def is_readable(self) -> bool:
        return not self.load_error

    def describe_load_error(self) -> str:
        return (
            f"{self._label} in PD (revision {self.revision}): unusable, because {self.load_error};"
            " the last readable version stays in force"
        )

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
        decoded, load_error = None, ""
        try:
            own_raw, own_value = self._own_write
            known_value = own_value if entry.value == own_raw else None
            decoded = known_value or await asyncio.to_thread(_decode_value, self._codec, entry.value)
        except DecodeError as unusable:
            load_error = str(unusable)
        if entry.mod_revision <= self.revision:
            return  # `confirm_write` was called meanwhile
        self.revision, self.load_error = entry.mod_revision, load_error
        if decoded is not None:
            self.value, self.version = decoded, entry.mod_revision


def _describe_key(key: str) -> str:
    return f"{key} in PD"


def _encode_value(codec: VersionedCodec[T], value: T, writer: str) -> bytes:
    raw = codec.encode(value, writer)
    return raw if len(raw) <= _MAX_UNCOMPRESSED_BYTES else zlib.compress(raw, 1)


def _decode_value(codec: VersionedCodec[T], raw: bytes) -> T:
    return codec.decode(raw if raw[:1] == b"{" else _decompress(raw))


def _decompress(raw: bytes) -> bytes:
    unzip = zlib.decompressobj()
    try:
        plain = unzip.decompress(raw, _MAX_DECOMPRESSED_BYTES)
    except zlib.error:
        raise DecodeError("it is truncated or was not written by Tidevoy") from None
    if not unzip.eof:
        raise DecodeError("it is truncated or was not written by Tidevoy")
    return plain


def _without_term(saved: SavedPlan | None) -> SavedPlan | None:
    """Return a local plan without term and serial, which must not outrank the one in PD."""
    return None if saved is None else SavedPlan(saved.plan, saved.envoys)
