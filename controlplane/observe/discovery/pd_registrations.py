"""Parses the registrations of TiDB servers in PD's etcd and combines them into one Topology.

    /topology/tidb/<address>/info                                   JSON, stays until an operator deletes it
    /topology/tidb/<address>/ttl                                    has a lease: exists while the server runs
    /keyspaces/tidb/<keyspace>/topology/tidb/<address>/info, .../ttl   the same, for a server of a keyspace

`<address>` is the SQL address, which only the key contains. The value of `ttl` is a time and is ignored.
Source: pingcap/tidb pkg/domain/serverinfo/{info,syncer}.go, pkg/keyspace/keyspace.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controlplane import address as addresses
from controlplane.etcd.types import KeyChange
from controlplane.model.nodes import Node, Source, Topology, TopologyProblem

TIDB_PREFIX = "/topology/tidb/"
KEYSPACES_PREFIX = "/keyspaces/tidb/"
NO_KEYSPACE = ""

_MAX_INFO_BYTES = 65_536  # TiDB writes a few hundred bytes
_MAX_START_SECONDS = 1e12  # Unix time far in the future, still exact as a float


def parse_key(key: str) -> tuple[str, str] | None:
    """Return (keyspace, the rest after `/topology/tidb/`) of a key; None for keys of other components."""
    if key.startswith(TIDB_PREFIX):
        return NO_KEYSPACE, key.removeprefix(TIDB_PREFIX)
    keyspace, slash, after_keyspace = key.removeprefix(KEYSPACES_PREFIX).partition("/")
    path = slash + after_keyspace
    if not key.startswith(KEYSPACES_PREFIX) or not keyspace or not path.startswith(TIDB_PREFIX):
        return None
    return keyspace, path.removeprefix(TIDB_PREFIX)


def parse_address_field(rest: str) -> tuple[str, str]:
    """Parse `<address>/<field>` and normalize the address. Raises ValueError with a message for users."""
    address, slash, field = rest.rpartition("/")
    if not slash:
        raise ValueError("the key does not end in /info or /ttl")
    return addresses.join(*addresses.split(address)), field


class _ServerInfo(BaseModel):
    """The fields of an `info` value that we use; TiDB writes more fields."""

    model_config = ConfigDict(strict=True)

    ip: str
    status_port: int = Field(ge=1, le=65535)
    version: str = ""
    labels: dict[str, str] | None = None
    start_timestamp: float | None = Field(None, ge=0, lt=_MAX_START_SECONDS)


def parse_info(address: str, value: bytes) -> Node:
    """Parse an `info` value as a node with `registered=False`. Raises ValueError with a message for users."""
    if len(value) > _MAX_INFO_BYTES:
        raise ValueError(f"the value has {len(value)} bytes, more than {_MAX_INFO_BYTES}")
    try:
        info = _ServerInfo.model_validate_json(value)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"])) or "the value"
        raise ValueError(f"{location} is invalid: {first['msg']}") from None
    status_address = addresses.join(info.ip, info.status_port)
    try:
        addresses.split(status_address)
    except ValueError:
        raise ValueError(f"ip is {info.ip!r:.60}, neither an IP address nor a host name") from None
    return Node(
        address=address,
        source=Source.PD,
        status_address=status_address,
        version=info.version,
        labels=MappingProxyType(info.labels or {}),
        started_at=info.start_timestamp,
        registered=False,
    )


@dataclass(frozen=True, slots=True)
class _Registration:
    """The registration of one address in one keyspace. `node` comes from the last valid `info`."""

    info: bytes | None = None
    has_ttl: bool = False
    node: Node | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _CombinedRegistration:
    """The combination of all registrations of one address."""

    node: Node | None = None
    other_keyspace: str | None = None
    problem: str = ""


class PdRegistrations:
    """All registrations of TiDB servers in PD. Only changed keys are parsed."""

    def __init__(self, keyspace: str = NO_KEYSPACE) -> None:
        """`keyspace`: the keyspace whose nodes get sessions."""
        self._served_keyspace = keyspace
        self._registrations: dict[str, dict[str, _Registration]] = {}  # by address, then by keyspace
        self._invalid_keys: dict[str, str] = {}  # key -> why it is invalid
        self._combined: dict[str, _CombinedRegistration] = {}

    def replace_prefix(self, entries: Mapping[str, bytes], prefix: str = "") -> bool:
        """Replace all keys with this prefix by `entries`; return whether the topology changed."""
        deletions = [
            KeyChange(key, None) for key in self._keys() if key.startswith(prefix) and key not in entries
        ]
        return self.apply([*deletions, *(KeyChange(key, value) for key, value in entries.items())])

    def apply(self, changes: Iterable[KeyChange]) -> bool:
        """Apply changes in their order; return whether the topology changed."""
        changed = False
        changed_addresses: dict[str, None] = {}
        for change in changes:
            parsed = parse_key(change.key)
            if parsed is None:
                continue
            keyspace, rest = parsed
            try:
                address, field = parse_address_field(rest)
            except ValueError as error:
                if keyspace == self._served_keyspace:
                    changed |= self._set_invalid_key(change.key, None if change.value is None else str(error))
                continue
            if self._update_registration(address, keyspace, field, change.value):
                changed_addresses[address] = None
        for address in changed_addresses:
            changed |= self._update_combined(address)
        return changed

    def topology(self) -> Topology:
        """Return the topology, marked as complete. Call this only when all keys are known."""
        combined = self._combined.items()
        problem_by_key = self._invalid_keys | {
            _build_key(self._served_keyspace, address): registration.problem
            for address, registration in combined
            if registration.problem
        }
        return Topology(
            source=Source.PD,
            nodes=MappingProxyType({address: c.node for address, c in combined if c.node is not None}),
            other_keyspace=MappingProxyType(
                {address: c.other_keyspace for address, c in combined if c.other_keyspace is not None}
            ),
            problems=tuple(
                TopologyProblem(Source.PD, *problem) for problem in sorted(problem_by_key.items())
            ),
            is_complete=True,
        )

    def _keys(self) -> Iterable[str]:
        yield from self._invalid_keys
        for address, registrations in self._registrations.items():
            for keyspace, registration in registrations.items():
                if registration.info is not None:
                    yield _build_key(keyspace, address)
                if registration.has_ttl:
                    yield _build_key(keyspace, address, "ttl")

    def _set_invalid_key(self, key: str, reason: str | None) -> bool:
        before = self._invalid_keys.get(key)
        if reason is None:
            self._invalid_keys.pop(key, None)
        else:
            self._invalid_keys[key] = reason
        return reason != before

    def _update_registration(self, address: str, keyspace: str, field: str, value: bytes | None) -> bool:
        """Apply a change of one key; return whether the registration changed. Unknown fields are ignored."""
        registrations = self._registrations.get(address, {})
        before = registrations.get(keyspace, _Registration())
        if field == "ttl":
            after = replace(before, has_ttl=value is not None)
        elif field != "info" or value == before.info:
            return False
        elif value is None:
            after = _Registration(has_ttl=before.has_ttl)
        elif keyspace != self._served_keyspace:
            after = replace(before, info=value)
        else:
            after = _parse_registration(address, value, before)
        if after == before:
            return False
        if after == _Registration():
            del registrations[keyspace]
        else:
            registrations[keyspace] = after
        if registrations:
            self._registrations[address] = registrations
        else:
            self._registrations.pop(address, None)
        return True

    def _update_combined(self, address: str) -> bool:
        before = self._combined.get(address, _CombinedRegistration())
        after = _combine(self._registrations.get(address, {}), self._served_keyspace)
        if after == before:
            return False
        if after == _CombinedRegistration():
            del self._combined[address]
        else:
            self._combined[address] = after
        return True


def _parse_registration(address: str, value: bytes, before: _Registration) -> _Registration:
    try:
        return _Registration(value, before.has_ttl, parse_info(address, value))
    except ValueError as error:
        # The node from the last valid entry stays: an invalid entry must not take it out of service.
        suffix = "; the last valid entry stays in effect" if before.node else ""
        return _Registration(value, before.has_ttl, before.node, f"{error}{suffix}")


def _combine(registrations: Mapping[str, _Registration], served_keyspace: str) -> _CombinedRegistration:
    """Combine the registrations of one address. The keys of `registrations` are keyspaces.

    `info` of another keyspace may be outdated, but its `ttl` proves that a server of that keyspace runs at
    this address. Our sessions must not go there, even if our keyspace has an entry for the address too.
    """
    ours = registrations.get(served_keyspace, _Registration())
    others = sorted(keyspace for keyspace in registrations if keyspace != served_keyspace)
    running = [keyspace for keyspace in others if registrations[keyspace].has_ttl]
    if ours.info is None:
        return _CombinedRegistration(other_keyspace=next(iter(running or others), None))
    if running:
        owner = f"a server of keyspace {running[0]}" if running[0] else "a server without a keyspace"
        return _CombinedRegistration(
            other_keyspace=running[0],
            problem=f"this address gets no sessions, as {owner} runs at it too; delete the outdated entry",
        )
    node = replace(ours.node, registered=ours.has_ttl) if ours.node else None
    return _CombinedRegistration(node=node, problem=ours.problem)


def _build_key(keyspace: str, address: str, field: str = "info") -> str:
    keyspace_prefix = f"{KEYSPACES_PREFIX}{keyspace}" if keyspace else ""
    return f"{keyspace_prefix}{TIDB_PREFIX}{address}/{field}"
