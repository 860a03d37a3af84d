"""Where things are in PD, and what the small ones say. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.etcd.types import Entry


@dataclass(frozen=True, slots=True)
class EtcdKeys:
    """The keys under a prefix, which ends with a slash."""

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
        """The key of the rollout with that id."""
        return f"{self.rollouts}{name}"

    def replica(self, name: str) -> str:
        """The key at which a replica is registered."""
        return f"{self.replicas}{name}"


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who leads. `term` is the revision at which that began; `lease` that of the leader."""

    name: str
    lease: str
    since: float
    term: int


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica as it registered. `instance` is new with each start of its process."""

    name: str
    address: str
    version: str
    since: float
    instance: str


def decode_leader(entry: Entry | None) -> LeaderRecord | None:
    """Who leads; None: nobody. One whom we cannot read leads all the same."""
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
    """What a leader writes."""
    return json.dumps({"name": name, "lease": f"{lease:x}", "since": since}).encode()


def decode_replicas(entries: Mapping[str, Entry], keys: EtcdKeys) -> dict[str, ReplicaRecord]:
    """All replicas that are there, by name; without those whose address cannot be read."""
    found = {}
    for key, entry in sorted(entries.items()):
        if not key.startswith(keys.replicas):
            continue
        name, fields = key.removeprefix(keys.replicas), _decode_object(entry.value)
        if address := _text_field(fields, "address"):
            found[name] = ReplicaRecord(
                name,
                address,
                _text_field(fields, "version"),
                _number_field(fields, "since"),
                _text_field(fields, "instance"),
            )
    return found


def encode_replica(replica: ReplicaRecord) -> bytes:
    """What a replica writes."""
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
