"""The store that all replicas share, in PD: all by compare-and-set, and the leader's writes are fenced."""

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
    NotLeading,
    PdError,
    StateUnavailable,
    Superseded,
    Uncertain,
)
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry
from controlplane.model.intents import Intents
from controlplane.model.rollout import Rollout
from controlplane.storage.clamp_timestamps import in_turn
from controlplane.storage.etcd_keys import Keys
from controlplane.storage.etcd_mirror import Mirror
from controlplane.storage.file_formats import INTENTS, PLAN, ROLLOUT
from controlplane.storage.file_store import StateDirectory
from controlplane.storage.store import SavedPlan, Stored, Versioned
from controlplane.storage.versioned_codec import Envelope, Unusable

T = TypeVar("T")

# Seconds of a write: first it is asked whether PD serves at all, so that a write that nobody answers, and
# that may be carried out much later, is a rare thing. Together below 5.
_ASK, _WRITE, _READ_BACK = 1.8, 2.0, 1.0
_LARGEST = 1_400_000  # bytes; etcd takes requests of 1.5 MiB, unless it is set otherwise, as in PD
_LARGEST_PLAIN = 1 << 26
# Bytes up to which a value is written as JSON, for people to read with etcdctl. PD keeps each revision for an
# hour: a rollout of 2,000 nodes, of 900 KB, would fill it.
_PLAIN = 16_384


class SharedStore:
    """A `Store` in PD, with a copy of what is needed to start without PD in a directory of our own."""

    is_shared = True

    def __init__(
        self, client: EtcdClient, keys: Keys, mirror: Mirror, copy: StateDirectory, instance: str
    ) -> None:
        """`instance` is new with each start of a control plane."""
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._copy = copy
        self._instance = instance
        self._writes = itertools.count(1)
        self._intents = _Read("intents", INTENTS)
        self._plan = _Read("the plan", PLAN)
        self._rollouts: dict[str, _Read[Rollout]] = {}
        self._plan_revision = 0  # of the plan that we have read or written last
        self._stored: Stored | None = None
        self._seen: tuple[int, ...] = ()  # the revisions in it

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Connections to PD, and the directory, which no other control plane may have. ConfigError."""
        async with self._copy.held(), self._client:
            yield

    async def load(self) -> Stored:
        """What is in PD, or in the copy of it when PD does not answer: to start with what was known last.

        ConfigError when there are intents that cannot be read, neither there nor here.
        """
        copy = await self._copy.load()
        try:
            await self._mirror.load()
        except PdError:
            return Stored(Versioned(copy.intents.value), _of_no_term(copy.plan), damages=copy.damages)
        found = await self.look(self._mirror.entries)
        if self._intents.damage and not copy.intents.version:
            raise ConfigError(
                f"{self._keys.intents} in PD",
                "",
                f"it could not be used, because {self._intents.damage}",
                f"run the newer Tidevoy here too, or delete it with `etcdctl del {self._keys.intents}`",
            )
        intents = found.intents
        if not intents.version:
            # Nobody has shared anything yet, or we cannot read it: what was asked for here stays asked for.
            intents = Versioned(copy.intents.value)
            if not self._intents.damage and copy.intents.version:
                intents = await self._hand_in(copy.intents.value)
        plan = found.plan or _of_no_term(copy.plan)
        return Stored(intents, plan, found.rollouts, (*copy.damages, *found.damages))

    async def look(self, entries: Mapping[str, Entry]) -> Stored:
        """What these keys hold; the same as before when nothing has changed.

        What cannot be read is named, and the last that could be is in its place.
        """
        await self._intents.look(entries.get(self._keys.intents))
        await self._plan.look(entries.get(self._keys.plan))
        if self._plan.is_fine:
            self._plan_revision = max(self._plan_revision, self._plan.revision)
        there = {key: entry for key, entry in entries.items() if key.startswith(self._keys.rollouts)}
        for key in self._rollouts.keys() - there.keys():
            del self._rollouts[key]
        for key, entry in there.items():
            name = key.removeprefix(self._keys.rollouts)
            await self._rollouts.setdefault(key, _Read(f"the rollout {name}", ROLLOUT)).look(entry)
        reads: list[_Read[Any]] = [self._intents, self._plan, *self._rollouts.values()]
        seen = tuple(read.revision for read in reads)
        if self._stored is None or seen != self._seen:
            self._seen, self._stored = seen, self._found(reads)
        return self._stored

    def _found(self, reads: Sequence[_Read[Any]]) -> Stored:
        return Stored(
            intents=Versioned(self._intents.value or Intents(), self._intents.version),
            plan=self._plan.value,
            rollouts=MappingProxyType(
                {
                    key.removeprefix(self._keys.rollouts): Versioned(in_turn(read.value), read.version)
                    for key, read in self._rollouts.items()
                    if read.value is not None
                }
            ),
            damages=tuple(read.told() for read in reads if read.damage),
        )

    @property
    def is_readable(self) -> bool:
        """Whether the plan and the intents in PD are such as we can use: else we are not fit to lead."""
        return self._plan.is_fine and self._intents.is_fine

    async def read_intents(self) -> Versioned[Intents]:
        """The intents that are in PD now. StateUnavailable."""
        entry = await self._read(self._keys.intents, _ASK)
        if entry is None:
            return Versioned(Intents())
        return Versioned(await self._opened(self._keys.intents, INTENTS, entry), entry.mod_revision)

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Write them over that version. StateUnavailable, Superseded."""
        raw = await self._sealed(self._keys.intents, INTENTS, intents)
        await self._ask(self._keys.intents)
        return await self._write(self._keys.intents, raw, version)

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """The rollout with that id that is in PD now. StateUnavailable."""
        key = self._keys.rollout(name)
        entry = await self._read(key, _ASK)
        if entry is None:
            return None
        return Versioned(in_turn(await self._opened(key, ROLLOUT, entry)), entry.mod_revision)

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Write it over that version, with a `term` only while we lead in it.

        StateUnavailable, Superseded, NotLeading.
        """
        key = self._keys.rollout(rollout.id)
        raw = await self._sealed(key, ROLLOUT, rollout)
        await self._ask(key)
        return await self._write(key, raw, version, term)

    async def forget_rollout(self, name: str, version: int) -> None:
        """Delete it. StateUnavailable, Superseded."""
        key = self._keys.rollout(name)
        await self._ask(key)
        try:
            done = await self._client.txn({key: version}, deletes=(key,), within=_WRITE)
        except PdError as error:
            raise StateUnavailable(
                _in_pd(key), str(error), is_certain=not isinstance(error, Uncertain)
            ) from error
        if done is None:
            raise Superseded(f"the rollout {name}")

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the plan while we lead in `saved.term`. NotLeading, StateUnavailable."""
        key = self._keys.plan
        raw = await self._sealed(key, PLAN, saved)
        self._plan.writes(raw, saved)
        try:
            self._plan_revision = await self._write(key, raw, self._plan_revision, saved.term)
        except Superseded:
            # Not by another leader: a hand has deleted or replaced it. It is not overwritten unread.
            entry = await self._read(key, _ASK)
            if entry is not None:
                await self._opened(key, PLAN, entry)
            self._plan_revision = entry.mod_revision if entry is not None else 0
            self._plan_revision = await self._write(key, raw, self._plan_revision, saved.term)
        self._plan.wrote(saved, self._plan_revision)

    async def _hand_in(self, intents: Intents) -> Versioned[Intents]:
        """What a control plane had for itself, to be shared from now on, unless others were there before."""
        try:
            return Versioned(intents, await self.save_intents(intents, 0))
        except Superseded:
            return await self.read_intents()
        except StateUnavailable:
            return Versioned(intents)

    async def _ask(self, key: str) -> None:
        """StateUnavailable when PD would not answer a write of that key."""
        try:
            await self._client.get(self._keys.leader, within=_ASK)  # a small one will do
        except PdError as error:
            raise StateUnavailable(_in_pd(key), str(error)) from error

    async def _sealed(self, key: str, envelope: Envelope[T], value: T) -> bytes:
        """What is to be written. StateUnavailable: PD would not take so much."""
        # What we write is like nothing else, so that it is known again: see `_look_back`.
        by = f"{self._instance}/{next(self._writes)}"
        raw = await asyncio.to_thread(_packed, envelope, value, by)
        if len(raw) > _LARGEST:
            raise StateUnavailable(_in_pd(key), f"it has {len(raw)} bytes, and PD takes {_LARGEST} at most")
        return raw

    async def _opened(self, key: str, envelope: Envelope[T], entry: Entry) -> T:
        """What is there. StateUnavailable: we cannot read it, so it is not to be overwritten."""
        try:
            return await asyncio.to_thread(_unpacked, envelope, entry.value)
        except Unusable as unusable:
            raise StateUnavailable(
                _in_pd(key),
                f"what it holds must not be overwritten, because {unusable}; run the newer Tidevoy here too,"
                f" or delete it with `etcdctl del {key}`",
            ) from None

    async def _read(self, key: str, within: float) -> Entry | None:
        try:
            return await self._client.get(key, within=within)
        except PdError as error:
            raise StateUnavailable(_in_pd(key), str(error)) from error

    async def _write(self, key: str, raw: bytes, version: int, term: int | None = None) -> int:
        expect = {key: version}
        if term is not None:
            expect[self._keys.leader] = term
        try:
            revision = await self._client.txn(expect, puts={key: raw}, within=_WRITE)
        except Uncertain as error:
            return await self._look_back(key, raw, version, error)
        except PdError as error:
            raise StateUnavailable(_in_pd(key), str(error)) from error
        if revision is not None:
            return revision
        if term is not None:
            leader = await self._read(self._keys.leader, _READ_BACK)
            if leader is None or leader.mod_revision != term:
                raise NotLeading(f"writing {key} in PD")
        raise Superseded(_in_pd(key))

    async def _look_back(self, key: str, raw: bytes, version: int, error: Uncertain) -> int:
        """Whether a write was carried out of which nobody knows."""
        try:
            entry = await self._client.get(key, within=_READ_BACK)
        except PdError:
            raise StateUnavailable(_in_pd(key), str(error), is_certain=False) from error
        if entry is not None and entry.value == raw:
            return entry.mod_revision
        if (entry.mod_revision if entry is not None else 0) == version:
            # Not yet; the request may still be on its way.
            raise StateUnavailable(_in_pd(key), str(error), is_certain=False) from error
        raise Superseded(_in_pd(key))


class _Read(Generic[T]):
    """One key as it was read last: decoded once for each version."""

    def __init__(self, what: str, envelope: Envelope[T]) -> None:
        self._what = what
        self._envelope = envelope
        self.revision = 0  # of what is there
        self.version = 0  # of the value
        self.value: T | None = None  # the last that could be read
        self.damage = ""
        self._ours: tuple[bytes, T | None] = (b"", None)

    @property
    def is_fine(self) -> bool:
        return not self.damage

    def told(self) -> str:
        return (
            f"{self._what} in PD (revision {self.revision}) could not be used, because {self.damage};"
            " what was known before stays in force"
        )

    def writes(self, raw: bytes, value: T) -> None:
        """We are about to write that, and may read it before we hear that it is written."""
        self._ours = (raw, value)

    def wrote(self, value: T, revision: int) -> None:
        """We have written it ourselves."""
        if revision > self.revision:
            self.revision, self.version, self.value, self.damage = revision, revision, value, ""

    async def look(self, entry: Entry | None) -> None:
        if entry is None:
            if self.revision:
                self.revision, self.version, self.value, self.damage = 0, 0, None, ""
            return
        if entry.mod_revision <= self.revision:
            return
        opened, damage = None, ""
        try:
            ours, value = self._ours
            known = value if entry.value == ours else None
            opened = known or await asyncio.to_thread(_unpacked, self._envelope, entry.value)
        except Unusable as unusable:
            damage = str(unusable)
        if entry.mod_revision <= self.revision:
            return  # we have written it ourselves meanwhile
        self.revision, self.damage = entry.mod_revision, damage
        if opened is not None:
            self.value, self.version = opened, entry.mod_revision


def _in_pd(key: str) -> str:
    return f"{key} in PD"


def _packed(envelope: Envelope[T], value: T, by: str) -> bytes:
    raw = envelope.seal(value, by)
    return raw if len(raw) <= _PLAIN else zlib.compress(raw, 1)


def _unpacked(envelope: Envelope[T], raw: bytes) -> T:
    return envelope.open(raw if raw[:1] == b"{" else _unzipped(raw))


def _unzipped(raw: bytes) -> bytes:
    unzip = zlib.decompressobj()
    try:
        plain = unzip.decompress(raw, _LARGEST_PLAIN)
    except zlib.error:
        raise Unusable("it is torn or was not written by Tidevoy") from None
    if not unzip.eof:
        raise Unusable("it is torn or was not written by Tidevoy")
    return plain


def _of_no_term(saved: SavedPlan | None) -> SavedPlan | None:
    """A plan that is not the one in PD, however high its numbers are."""
    return None if saved is None else SavedPlan(saved.plan, saved.envoys)
