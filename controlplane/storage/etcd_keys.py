"""The etcd keys of Tidevoy, and the encoding of leader and replica records. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controlplane.etcd.types import Entry


class EtcdKeys:
    """Tidevoy's keys, all of which begin with `prefix`; the prefix ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.intents, self.plan, self.leader = f"{prefix}intents", f"{prefix}plan", f"{prefix}leader"
        self.rollouts, self.replicas = f"{prefix}rollouts/", f"{prefix}replicas/"

    def rollout(self, rollout_id: str) -> str:
        return f"{self.rollouts}{rollout_id}"

    def replica(self, name: str) -> str:
        return f"{self.replicas}{name}"


class LeaderRecord(BaseModel):
    """The leader. `term` is the etcd revision at which it became leader, `lease` its hexadecimal lease id."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str = ""
    lease: str = ""
    since: float = 0.0
    term: int = Field(default=0, exclude=True)

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class ReplicaRecord(BaseModel):
    """The record that a replica registers. `instance` changes with each start of its process."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str = Field(default="", exclude=True)
    address: str = Field(min_length=1)
    version: str = ""
    since: float = 0.0
    instance: str = ""

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


def decode_leader(entry: Entry | None) -> LeaderRecord | None:
    """Return the leader, or None if there is none. An unreadable record gives a leader without a name."""
    if entry is None:
        return None
    try:
        record = LeaderRecord.model_validate_json(entry.value)
    except ValidationError:
        record = LeaderRecord()
    return record.model_copy(update={"term": entry.mod_revision})


def decode_replicas(entries: Mapping[str, Entry], keys: EtcdKeys) -> dict[str, ReplicaRecord]:
    """Return all registered replicas by name, without unreadable records."""
    replicas = {}
    for key, entry in sorted(entries.items()):
        if key.startswith(keys.replicas):
            with suppress(ValidationError):
                record = ReplicaRecord.model_validate_json(entry.value)
                name = key.removeprefix(keys.replicas)
                replicas[name] = record.model_copy(update={"name": name})
    return replicas
