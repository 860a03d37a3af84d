"""The etcd keys of Tidevoy, and the encoding of leader and replica records. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.etcd.types import Entry


@dataclass(frozen=True, slots=True)
class EtcdKeys:
    """The keys under a prefix that ends with a slash."""

    prefix: str

    @property
    def intents(self) -> str:
        return f"{self.prefix}intents"

    @property
    def plan(self) -> str:
        return f"{self.prefix}plan"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def rollouts(self) -> str:
        return f"{self.prefix}rollouts/"

    @property
    def replicas(self) -> str:
        return f"{self.prefix}replicas/"

    def rollout(self, name: str) -> str:
        """Return the key of the rollout with that id."""
        return f"{self.rollouts}{name}"

    def replica(self, name: str) -> str:
        """Return the key of a replica's registration."""
        return f"{self.replicas}{name}"


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leader. `term` is the revision at which it became leader; `lease` is its lease."""

    name: str
    lease: str
    since: float
    term: int


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica as it registered. `instance` changes with each start of its process."""

    name: str
    address: str
    version: str
    since: float
    instance: str


def decode_leader(entry: Entry | None) -> LeaderRecord | None:
    """Return the leader; None: there is none. An unreadable record still counts as a leader."""
    if entry is None:
        return None
    fields = _decode_object(entry.value)
    return LeaderRecord(
        _text_field(fields, "name"),
        _text_field(fields, "lease"),
        _number_field(fields, "since"),
        entry.mod_revision,
    )


def encode_leader(name: str, lease: int, since: float) -> bytes:
    """Encode the record of a leader."""
    return json.dumps({"name": name, "lease": f"{lease:x}", "since": since}).encode()


def decode_replicas(entries: Mapping[str, Entry], keys: EtcdKeys) -> dict[str, ReplicaRecord]:
    """Return all registered replicas by name, without those whose address is unreadable."""
    replicas = {}
    for key, entry in sorted(entries.items()):
        if not key.startswith(keys.replicas):
            continue
        name, fields = key.removeprefix(keys.replicas), _decode_object(entry.value)
        if address := _text_field(fields, "address"):
            replicas[name] = ReplicaRecord(
                name,
                address,
                _text_field(fields, "version"),
                _number_field(fields, "since"),
                _text_field(fields, "instance"),
            )
    return replicas


def encode_replica(replica: ReplicaRecord) -> bytes:
    """Encode the record of a replica."""
    return json.dumps(
        {
            "address": replica.address,
            "version": replica.version,
            "since": replica.since,
            "instance": replica.instance,
        }
    ).encode()


def _decode_object(value: bytes) -> Mapping[str, Any]:
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _text_field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _number_field(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
