"""Where things are in PD, and what the small ones say. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.etcd.types import Entry


@dataclass(frozen=True, slots=True)
class Keys:
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
class Reign:
    """Who leads. `term` is the revision at which that began; `lease` that of the leader."""

    name: str
    lease: str
    since: float
    term: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A replica as it registered. `instance` is new with each start of its process."""

    name: str
    address: str
    version: str
    since: float
    instance: str


def reign(entry: Entry | None) -> Reign | None:
    """Who leads; None: nobody. One whom we cannot read leads all the same."""
    if entry is None:
        return None
    said = _object(entry.value)
    return Reign(_text(said, "name"), _text(said, "lease"), _number(said, "since"), entry.mod_revision)


def reign_value(name: str, lease: int, since: float) -> bytes:
    """What a leader writes."""
    return json.dumps({"name": name, "lease": f"{lease:x}", "since": since}).encode()


def registered(entries: Mapping[str, Entry], keys: Keys) -> dict[str, Registered]:
    """All replicas that are there, by name; without those whose address cannot be read."""
    found = {}
    for key, entry in sorted(entries.items()):
        if not key.startswith(keys.replicas):
            continue
        name, said = key.removeprefix(keys.replicas), _object(entry.value)
        if address := _text(said, "address"):
            found[name] = Registered(
                name, address, _text(said, "version"), _number(said, "since"), _text(said, "instance")
            )
    return found


def registered_value(replica: Registered) -> bytes:
    """What a replica writes."""
    return json.dumps(
        {
            "address": replica.address,
            "version": replica.version,
            "since": replica.since,
            "instance": replica.instance,
        }
    ).encode()


def _object(value: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    return value if isinstance(value, str) else ""


def _number(said: Mapping[str, Any], name: str) -> float:
    value = said.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
