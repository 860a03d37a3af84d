"""With a real etcd, EtcdStore neither loses nor damages data, and never overwrites unreadable values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.errors import ConfigError, NotLeader, OutcomeUnknown, StateUnavailable, VersionConflict
from controlplane.etcd.client import EtcdClient
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import EMPTY_MAP, Node, Source, State
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan
from controlplane.model.rollout import Rollout, RolloutSpec, Stage, Step
from controlplane.storage.etcd_keys import EtcdKeys
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.etcd_store import EtcdStore
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import SavedPlan, Versioned
from sandbox.etcd import Etcd
from tests.support.suspension import suspended
from tests.support.waiting import wait_until

KEYS = EtcdKeys("/tidevoy/")
DRAINED = Intents(drains={"a:1": DrainIntent(1.5, 600.0)})
PLAN = Plan(nodes={"a:1": NodePlan(Node("a:1", Source.PD), State.ACTIVE, "why", 2.0)})
ROLLOUT = Rollout(
    "r1", RolloutSpec(("b:1", "a:1")), "me", 1.0, steps={"b:1": Step("b:1"), "a:1": Step("a:1")}
)


class StoreParts:
    """An EtcdStore and its parts."""

    def __init__(self, etcd: Etcd, directory: Path) -> None:
        self.client = EtcdClient([etcd.url])
        self.mirror = EtcdMirror(
            self.client, KEYS.prefix, on_change=lambda: None, on_outage=lambda outage: None
        )
        self.local_store = FileStore(directory, is_copy=True)
        self.store = EtcdStore(self.client, KEYS, self.mirror, self.local_store, directory.name)


@asynccontextmanager
async def open_store(etcd: Etcd, directory: Path) -> AsyncIterator[StoreParts]:
    parts = StoreParts(etcd, directory)
    async with parts.store.lock():
        yield parts


@pytest.fixture
async def first(etcd: Etcd, tmp_path: Path) -> AsyncIterator[StoreParts]:
    async with open_store(etcd, tmp_path / "first") as parts:
        yield parts


@pytest.fixture
async def second(etcd: Etcd, tmp_path: Path) -> AsyncIterator[StoreParts]:
    async with open_store(etcd, tmp_path / "second") as parts:
        yield parts


async def test_replica_reads_what_another_writes(first: StoreParts, second: StoreParts) -> None:
    stored = await first.store.load()
    assert (stored.intents, stored.plan, stored.rollouts) == (Versioned(Intents()), None, {})
    version = await first.store.save_intents(DRAINED, 0)
    rollout = await first.store.save_rollout(ROLLOUT, 0)
    term = await first.client.put(KEYS.leader, b"one")
    await first.store.save_plan(SavedPlan(PLAN, {"envoy-1": 3.0}, version, term, 4))
    stored = await second.store.load()
    assert stored.intents == Versioned(DRAINED, version)
    assert stored.plan == SavedPlan(PLAN, {"envoy-1": 3.0}, version, term, 4)
    assert stored.rollouts == {"r1": Versioned(ROLLOUT, rollout)}
    assert list(stored.rollouts["r1"].value.steps) == ["b:1", "a:1"]
    assert await second.store.read_rollout("r1") == Versioned(ROLLOUT, rollout)
    assert await second.store.read_rollout("r2") is None
    await second.store.delete_rollout("r1", rollout)
    assert (await first.store.load()).rollouts == {}


async def test_second_writer_of_a_version_gets_conflict(first: StoreParts, second: StoreParts) -> None:
    version = await first.store.save_intents(DRAINED, 0)
    with pytest.raises(VersionConflict, match="nothing was changed"):
        await second.store.save_intents(Intents(), 0)
    assert await second.store.read_intents() == Versioned(DRAINED, version)
    outcomes = await asyncio.gather(
        *(parts.store.save_intents(Intents(weights={"a:1": 5}), version) for parts in (first, second)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes if not isinstance(outcome, int)] == [VersionConflict]
    with pytest.raises(VersionConflict):
        await first.store.delete_rollout("r1", 7)


async def test_former_leader_cannot_write(first: StoreParts, second: StoreParts) -> None:
    term = await first.client.put(KEYS.leader, b"one")
    rollout = await first.store.save_rollout(ROLLOUT, 0, term)
    await first.store.save_plan(SavedPlan(PLAN, term=term, serial=1))
    later = await second.client.put(KEYS.leader, b"other")
    with pytest.raises(NotLeader, match="needs the leader"):
        await first.store.save_plan(SavedPlan(Plan(), term=term, serial=2))
    with pytest.raises(NotLeader):
        await first.store.save_rollout(ROLLOUT, rollout, term)
    await second.client.delete(KEYS.leader)
    with pytest.raises(NotLeader):
        await second.store.save_plan(SavedPlan(Plan(), term=later, serial=1))
    stored = await second.store.load()
    assert stored.plan == SavedPlan(PLAN, term=term, serial=1)


async def test_new_leader_replaces_plan_of_previous_one(first: StoreParts, second: StoreParts) -> None:
    term = await first.client.put(KEYS.leader, b"one")
    await first.store.save_plan(SavedPlan(PLAN, term=term, serial=1))
    await second.store.load()
    later = await second.client.put(KEYS.leader, b"other")
    for serial in (1, 2):
        await second.store.save_plan(SavedPlan(PLAN, term=later, serial=serial))
    await second.client.delete(KEYS.plan)  # an operator may do this
    await second.store.save_plan(SavedPlan(PLAN, term=later, serial=3))
    stored = await first.store.load()
    assert stored.plan == SavedPlan(PLAN, term=later, serial=3)


# --- unreadable values ---


async def write_newer_format(client: EtcdClient, key: str) -> bytes:
    """Rewrite the value of a key in the format of a newer Tidevoy. Return the new value."""
    entry = await client.get(key)
    assert entry is not None
    document = json.loads(entry.value)
    document["version"] = 99
    raw = json.dumps(document).encode()
    await client.put(key, raw)
    return raw


async def test_does_not_overwrite_intents_of_newer_format(first: StoreParts) -> None:
    version = await first.store.save_intents(DRAINED, 0)
    await first.store.load()
    raw = await write_newer_format(first.client, KEYS.intents)
    with pytest.raises(VersionConflict):
        await first.store.save_intents(Intents(), version)
    with pytest.raises(StateUnavailable, match=r"it has format 99.*`etcdctl del /tidevoy/intents`"):
        await first.store.read_intents()
    await first.mirror.load()
    stored = await first.store.refresh(first.mirror.entries)
    assert stored.intents.value == DRAINED  # the last readable intents stay in force
    assert len(stored.load_errors) == 1
    assert "intents in PD" in stored.load_errors[0]
    assert not first.store.is_readable
    entry = await first.client.get(KEYS.intents)
    assert entry is not None
    assert entry.value == raw


async def test_unreadable_intents_without_local_copy_stop_start(
    first: StoreParts, second: StoreParts
) -> None:
    await first.store.save_intents(DRAINED, 0)
    await write_newer_format(first.client, KEYS.intents)
    with pytest.raises(ConfigError, match=r"/tidevoy/intents in PD.*format 99.*run the newer Tidevoy"):
        await second.store.load()
    await second.local_store.save_intents(DRAINED, 0)
    assert (await second.store.load()).intents == Versioned(DRAINED)


NAN_PLAN = b'{"tidevoy": "plan", "version": 2, "sha256": "", "content": {"term": NaN}}'


@pytest.mark.parametrize("raw", [b"", b"{}", b"\0damaged", b"x\x9c\x03", NAN_PLAN])
async def test_does_not_overwrite_damaged_plan(raw: bytes, first: StoreParts) -> None:
    term = await first.client.put(KEYS.leader, b"one")
    await first.store.save_plan(SavedPlan(PLAN, term=term, serial=1))
    await first.client.put(KEYS.plan, raw)
    with pytest.raises(StateUnavailable, match=r"must not be overwritten"):
        await first.store.save_plan(SavedPlan(PLAN, term=term, serial=2))
    await first.mirror.load()
    assert (await first.store.refresh(first.mirror.entries)).plan == SavedPlan(PLAN, term=term, serial=1)
    assert not first.store.is_readable
    await first.client.delete(KEYS.plan)
    await first.store.save_plan(SavedPlan(PLAN, term=term, serial=2))
    await first.mirror.load()
    assert (await first.store.refresh(first.mirror.entries)).load_errors == ()
    assert first.store.is_readable


async def test_damaged_rollout_does_not_affect_others(first: StoreParts) -> None:
    await first.store.save_rollout(ROLLOUT, 0)
    await first.client.put(KEYS.rollout("r2"), b"{}")
    stored = await first.store.load()
    assert (list(stored.rollouts), len(stored.load_errors)) == (["r1"], 1)
    with pytest.raises(VersionConflict):
        await first.store.save_rollout(replace(ROLLOUT, id="r2"), 0)


# --- without PD ---


async def test_start_without_pd_uses_local_copy(first: StoreParts, etcd: Etcd, tmp_path: Path) -> None:
    await first.local_store.save_intents(DRAINED, 0)
    await first.local_store.save_plan(SavedPlan(PLAN, {"envoy-1": 3.0}, 8, 900, 4))
    await etcd.terminate()
    stored = await first.store.load()
    assert stored.intents == Versioned(DRAINED)
    assert stored.plan == SavedPlan(PLAN, {"envoy-1": 3.0})


async def test_imports_local_intents_once(first: StoreParts, second: StoreParts) -> None:
    await first.local_store.save_intents(DRAINED, 0)
    loaded = await first.store.load()
    assert loaded.intents.value == DRAINED
    assert loaded.intents.version > 0
    await second.local_store.save_intents(Intents(weights={"a:1": 5}), 0)
    assert (await second.store.load()).intents == loaded.intents


async def test_write_to_silent_pd_times_out_without_effect(first: StoreParts, etcd: Etcd) -> None:
    version = await first.store.save_intents(DRAINED, 0)
    loop = asyncio.get_running_loop()
    async with suspended(etcd.process.pid):
        started_at = loop.time()
        with pytest.raises(StateUnavailable, match="nothing was changed") as error:
            await first.store.save_intents(Intents(), version)
        assert loop.time() - started_at < 5.0
        assert error.value.is_certain

    async def is_back() -> bool:
        try:
            return await first.store.read_intents() == Versioned(DRAINED, version)
        except StateUnavailable:
            return False

    await wait_until(is_back)


async def test_write_without_response_is_read_back(
    first: StoreParts, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the response is lost, the store reads the key. A write that took effect counts as success."""
    original_txn = first.client.txn

    async def txn_with_lost_response(*args: object, **kwargs: object) -> int | None:
        await original_txn(*args, **kwargs)  # type: ignore[arg-type]
        raise OutcomeUnknown("PD did not answer in time")

    monkeypatch.setattr(first.client, "txn", txn_with_lost_response)
    version = await first.store.save_intents(DRAINED, 0)
    assert await first.store.read_intents() == Versioned(DRAINED, version)
    with pytest.raises(VersionConflict):
        await first.store.save_intents(Intents(), 0)

    async def txn_without_effect(*args: object, **kwargs: object) -> int | None:
        raise OutcomeUnknown("PD did not answer in time")

    monkeypatch.setattr(first.client, "txn", txn_without_effect)
    with pytest.raises(StateUnavailable, match="may or may not have been written") as error:
        await first.store.save_intents(Intents(), version)
    assert not error.value.is_certain


# --- size ---


def large_plan(nodes: int) -> Plan:
    """Return a plan in which all values differ, so that it compresses badly."""
    factor = Factor(0.7312345, 0.6, 1, "its CPU was over 80 % for a minute")
    return Plan(
        nodes={
            (address := f"tidb-{i}.tidb-peer.namespace-{i % 7}.svc.cluster.local:4000"): NodePlan(
                Node(
                    address,
                    Source.PD,
                    f"10.{i >> 8}.{i & 255}.1:10080",
                    "v8.5.3",
                    {"zone": f"zone-{i % 3}", "host": f"host-{i}", "rack": f"rack-{i % 91}"},
                    1_700_000_000.0 + i * 1.37,
                ),
                State.ACTIVE,
                "it passes its checks",
                1_700_000_000.123456 + i * 3.7,
                EdsHealth.HEALTHY,
                100_000 + i * 17 % 9973,
                f"10.{i >> 8}.{i & 255}.1:4000",
                active_since=1_700_000_000.654321 + i * 3.1,
                version="v8.5.3",
                factors={"cpu": replace(factor, share=0.5 + i / 20_000)} if i % 5 == 0 else EMPTY_MAP,
                zone=f"zone-{i % 3}",
            )
            for i in range(nodes)
        }
    )


async def test_plan_of_5000_nodes_fits(first: StoreParts, second: StoreParts) -> None:
    term = await first.client.put(KEYS.leader, b"one")
    envoys = {f"envoy-{i}": 1_700_000_000.123 + i for i in range(100)}
    saved = SavedPlan(large_plan(5000), envoys, 7, term, 1)
    await first.store.save_plan(saved)
    entry = await first.client.get(KEYS.plan)
    assert entry is not None
    assert len(entry.value) < 1_000_000
    assert (await second.store.load()).plan == saved


async def test_rollout_of_2000_nodes_is_compressed(first: StoreParts, second: StoreParts) -> None:
    reason = "it is back, and has passed its checks for 10 s"
    steps = {f"tidb-{i}:4000": Step(f"tidb-{i}:4000", Stage.DONE, reason, 1.7e9 + i) for i in range(2000)}
    rollout = Rollout("r2", RolloutSpec(tuple(steps)), "me", 1.0, steps=steps)
    await first.store.save_rollout(rollout, 0)
    version = await first.store.save_rollout(
        replace(rollout, reason="on"), (await stored(first, "r2")).version
    )
    assert await second.store.read_rollout("r2") == Versioned(replace(rollout, reason="on"), version)
    entry = await first.client.get(KEYS.rollout("r2"))
    assert entry is not None
    assert len(entry.value) < 60_000
    await first.store.save_rollout(ROLLOUT, 0)
    entry = await first.client.get(KEYS.rollout("r1"))
    assert entry is not None
    assert json.loads(entry.value)["content"]["id"] == "r1"  # readable for operators


async def stored(parts: StoreParts, name: str) -> Versioned[Rollout]:
    rollout = await parts.store.read_rollout(name)
    assert rollout is not None
    return rollout


async def test_rejects_too_large_plan_and_keeps_old_one(
    first: StoreParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.storage.etcd_store._MAX_VALUE_BYTES", 5000)
    term = await first.client.put(KEYS.leader, b"one")
    await first.store.save_plan(SavedPlan(PLAN, term=term, serial=1))
    with pytest.raises(StateUnavailable, match="PD accepts at most 5000"):
        await first.store.save_plan(SavedPlan(large_plan(300), term=term, serial=2))
    stored = await first.store.load()
    assert stored.plan == SavedPlan(PLAN, term=term, serial=1)
