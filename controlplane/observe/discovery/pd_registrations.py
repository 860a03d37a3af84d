"""Parses the registrations of TiDB servers in PD's etcd and combines them into one Topology.

    /topology/tidb/<address>/info                                   JSON, stays until somebody deletes it
    /topology/tidb/<address>/ttl                                    leased: exists while the server runs
    /keyspaces/tidb/<keyspace>/topology/tidb/<address>/info, .../ttl   the same, for a server of a keyspace

`<address>` is the SQL address; no value contains it (pingcap/tidb pkg/domain/serverinfo/{info,syncer}.go,
pkg/keyspace/keyspace.go). The value of `ttl` is a clock reading of that server and is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from controlplane import address as addresses
from controlplane.etcd.types import KeyChange
from controlplane.model.nodes import Node, Source, Topology, TopologyProblem

TIDB_PREFIX = "/topology/tidb/"
KEYSPACES_PREFIX = "/keyspaces/tidb/"
NO_KEYSPACE = ""

_MAX_INFO_BYTES = 65_536  # TiDB writes a few hundred bytes
_MAX_START_SECONDS = 1e12  # Unix time; far beyond any clock, and still exact as a float


def parse_key(key: str) -> tuple[str, str] | None:
    """Return (keyspace, the rest after `/topology/tidb/`) of a key; None if it is not about a TiDB server."""
    if key.startswith(TIDB_PREFIX):
        return NO_KEYSPACE, key.removeprefix(TIDB_PREFIX)
    keyspace, slash, after_keyspace = key.removeprefix(KEYSPACES_PREFIX).partition("/")
    path = slash + after_keyspace
    if not key.startswith(KEYSPACES_PREFIX) or not keyspace or not path.startswith(TIDB_PREFIX):
        return None
    return keyspace, path.removeprefix(TIDB_PREFIX)


def parse_address_field(rest: str) -> tuple[str, str]:
    """Split `<address>/<field>`; the address is normalized. Raises ValueError with a message for users."""
    address, slash, field = rest.rpartition("/")
    if not slash:
        raise ValueError("the key does not end in /info or /ttl")
    return addresses.join(*addresses.split(address)), field


def parse_info(address: str, value: bytes) -> Node:
    """Parse an `info` value as a node with `registered=False`. Raises ValueError with a message for users."""
    if len(value) > _MAX_INFO_BYTES:
        raise ValueError(f"the value has {len(value)} bytes, more than {_MAX_INFO_BYTES}")
    info = _parse_json(value)
    if not isinstance(info, dict):
        raise ValueError("the value is not a JSON object")
    port = info.get("status_port")
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise ValueError(f"status_port is {_format_value(port)}, not a number from 1 to 65535")
    host = _parse_text(info, "ip")
    status_address = addresses.join(host, port)
    try:
        addresses.split(status_address)
    except ValueError:
        raise ValueError(f"ip is {_format_value(host)}, neither an IP address nor a host name") from None
    return Node(
        address=address,
        source=Source.PD,
        status_address=status_address,
        version=_parse_text(info, "version", ""),
        git_hash=_parse_text(info, "git_hash", ""),
        labels=_parse_labels(info.get("labels")),
        started_at=_parse_start(info.get("start_timestamp")),
        registered=False,
    )


def _parse_json(value: bytes) -> Any:
    try:
        return json.loads(value.decode(), parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise ValueError("the value is not UTF-8") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the value is not JSON ({error})") from None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _parse_text(info: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = info.get(name, default)
    if not isinstance(value, str) or not _is_encodable(value):
        raise ValueError(f"{name} is {_format_value(value)}, not a valid string")
    return value


def _is_encodable(text: str) -> bool:
    # JSON can contain half a surrogate pair, which no protocol that forwards the text can encode.
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _parse_labels(value: Any) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, dict):
        raise ValueError(f"labels is {_format_value(value)}, not an object")
    if not all(_is_encodable(name) for name in value):
        raise ValueError("the name of a label is not a valid string")
    return MappingProxyType({name: _parse_text(value, name) for name in value})


def _parse_start(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MAX_START_SECONDS:
        raise ValueError(f"start_timestamp is {_format_value(value)}, not a Unix time in seconds")
    return float(value)


def _format_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class _Registration:
    """The registration of one address in one keyspace. `node` is from the last valid `info`."""

    info: bytes | None = None
    has_ttl: bool = False
    node: Node | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Resolution:
    """The result of all registrations of one address."""

    node: Node | None = None
    other_keyspace: str | None = None
    problem: str = ""


class PdRegistrations:
    """All registrations of one cluster, updated incrementally: only changed keys are parsed."""

    def __init__(self, keyspace: str = NO_KEYSPACE) -> None:
        """`keyspace`: the keyspace whose nodes get sessions."""
        self._served_keyspace = keyspace
        self._registrations: dict[str, dict[str, _Registration]] = {}  # address -> keyspace -> ...
        self._invalid_keys: dict[str, str] = {}  # keys that are not registrations -> the reason
        self._resolutions: dict[str, _Resolution] = {}
        self._nodes: dict[str, Node] = {}
        self._other_keyspace: dict[str, str] = {}
        self._problems: tuple[TopologyProblem, ...] | None = ()  # None: has to be rebuilt

    def replace(self, entries: Mapping[str, bytes]) -> bool:
        """Replace all registrations with a full listing; return whether the topology changed."""
        deletions = [KeyChange(key, None) for key in self._keys() if key not in entries]
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
            changed |= self._update_resolution(address)
        return changed

    def topology(self, *, is_complete: bool, outage: str) -> Topology:
        """Return a snapshot of the topology."""
        if self._problems is None:
            problem_by_key = self._invalid_keys | {
                _build_key(self._served_keyspace, address): resolution.problem
                for address, resolution in self._resolutions.items()
                if resolution.problem
            }
            self._problems = tuple(
                TopologyProblem(Source.PD, key, reason) for key, reason in sorted(problem_by_key.items())
            )
        return Topology(
            source=Source.PD,
            nodes=MappingProxyType(dict(self._nodes)),
            other_keyspace=MappingProxyType(dict(self._other_keyspace)),
            problems=self._problems,
            is_complete=is_complete,
            outage=outage,
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
        if self._invalid_keys.get(key) == reason:
            return False
        if reason is None:
            del self._invalid_keys[key]
        else:
            self._invalid_keys[key] = reason
        self._problems = None
        return True

    def _update_registration(self, address: str, keyspace: str, field: str, value: bytes | None) -> bool:
        """Apply one key; return whether the registration changed. Fields other than these two are ignored."""
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

    def _update_resolution(self, address: str) -> bool:
        before = self._resolutions.get(address, _Resolution())
        after = _resolve(self._registrations.get(address, {}), self._served_keyspace)
        if after == before:
            return False
        if after == _Resolution():
            del self._resolutions[address]
        else:
            self._resolutions[address] = after
        if after.node is None:
            self._nodes.pop(address, None)
        else:
            self._nodes[address] = after.node
        if after.other_keyspace is None:
            self._other_keyspace.pop(address, None)
        else:
            self._other_keyspace[address] = after.other_keyspace
        if after.problem != before.problem:
            self._problems = None
        return True


def _parse_registration(address: str, value: bytes, before: _Registration) -> _Registration:
    try:
        return _Registration(value, before.has_ttl, parse_info(address, value))
    except ValueError as error:
        # The last valid node stays: an invalid entry must not take it out of service.
        suffix = "; the last valid entry stays in effect" if before.node else ""
        return _Registration(value, before.has_ttl, before.node, f"{error}{suffix}")


def _resolve(registrations: Mapping[str, _Registration], served_keyspace: str) -> _Resolution:
    """Combine the registrations of one address (by keyspace) if `served_keyspace` is served.

    `info` of another keyspace may be years old, but a `ttl` means that a server of that keyspace runs at this
    address. It would give sessions access to that keyspace's data, whatever an entry of our keyspace says.
    """
    ours = registrations.get(served_keyspace, _Registration())
    others = sorted(keyspace for keyspace in registrations if keyspace != served_keyspace)
    running = [keyspace for keyspace in others if registrations[keyspace].has_ttl]
    if ours.info is None:
        return _Resolution(other_keyspace=next(iter(running or others), None))
    if running:
        owner = f"a server of keyspace {running[0]}" if running[0] else "a server without a keyspace"
        return _Resolution(
            other_keyspace=running[0],
            problem=f"this address gets no sessions, as {owner} runs at it too; delete the outdated entry",
        )
    node = replace(ours.node, registered=ours.has_ttl) if ours.node else None
    return _Resolution(node=node, problem=ours.problem)


def _build_key(keyspace: str, address: str, field: str = "info") -> str:
    keyspace_prefix = f"{KEYSPACES_PREFIX}{keyspace}" if keyspace else ""
    return f"{keyspace_prefix}{TIDB_PREFIX}{address}/{field}"
