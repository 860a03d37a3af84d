"""What TiDB servers write into PD's etcd, read: keys, their JSON, and all of it folded into one Topology.

    /topology/tidb/<address>/info                                   JSON, stays until somebody deletes it
    /topology/tidb/<address>/ttl                                    leased: there while the server lives
    /keyspaces/tidb/<keyspace>/topology/tidb/<address>/info, .../ttl   the same, for a server of a keyspace

`<address>` is the SQL address, found nowhere else (pingcap/tidb pkg/domain/serverinfo/{info,syncer}.go,
pkg/keyspace/keyspace.go). The value of `ttl` is a clock reading of that server and is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from controlplane import address as addresses
from controlplane.etcd.types import Change
from controlplane.model.nodes import Node, Problem, Source, Topology

TIDB_PREFIX = "/topology/tidb/"
KEYSPACES_PREFIX = "/keyspaces/tidb/"
NO_KEYSPACE = ""

_LARGEST_INFO = 65_536  # bytes; TiDB writes some hundred
_LATEST_START = 1e12  # Unix seconds; far beyond any clock, and still exact as a float


def locate(key: str) -> tuple[str, str] | None:
    """(keyspace, what follows `/topology/tidb/`) of a key; None when it is not about a TiDB server."""
    if key.startswith(TIDB_PREFIX):
        return NO_KEYSPACE, key.removeprefix(TIDB_PREFIX)
    keyspace, slash, rest = key.removeprefix(KEYSPACES_PREFIX).partition("/")
    path = slash + rest
    if not key.startswith(KEYSPACES_PREFIX) or not keyspace or not path.startswith(TIDB_PREFIX):
        return None
    return keyspace, path.removeprefix(TIDB_PREFIX)


def parse_leaf(rest: str) -> tuple[str, str]:
    """`<address>/<field>` as (address, field), the address in its usual spelling. ValueError, a sentence."""
    address, slash, field = rest.rpartition("/")
    if not slash:
        raise ValueError("the key does not end in /info or /ttl")
    return addresses.join(*addresses.split(address)), field


def parse_info(address: str, value: bytes) -> Node:
    """The node that an `info` value describes, not registered yet. ValueError with a sentence."""
    if len(value) > _LARGEST_INFO:
        raise ValueError(f"the value has {len(value)} bytes, more than {_LARGEST_INFO}")
    info = _parse_json(value)
    if not isinstance(info, dict):
        raise ValueError("the value is not a JSON object")
    port = info.get("status_port")
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise ValueError(f"status_port is {_shown(port)}, not a number from 1 to 65535")
    host = _text(info, "ip")
    status_address = addresses.join(host, port)
    try:
        addresses.split(status_address)
    except ValueError:
        raise ValueError(f"ip is {_shown(host)}, neither an IP address nor a host name") from None
    return Node(
        address=address,
        source=Source.PD,
        status_address=status_address,
        version=_text(info, "version", ""),
        git_hash=_text(info, "git_hash", ""),
        labels=_labels(info.get("labels")),
        started_at=_start(info.get("start_timestamp")),
        registered=False,
    )


def _parse_json(value: bytes) -> Any:
    try:
        return json.loads(value.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise ValueError("the value is not UTF-8") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the value is not JSON ({error})") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _text(info: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = info.get(name, default)
    if not isinstance(value, str) or not _encodable(value):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    return value


def _encodable(text: str) -> bool:
    # JSON can spell half a surrogate pair; no protocol that the text travels by could carry it.
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _labels(value: Any) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, dict):
        raise ValueError(f"labels is {_shown(value)}, not an object")
    if not all(_encodable(name) for name in value):
        raise ValueError("the name of a label is not a text")
    return MappingProxyType({name: _text(value, name) for name in value})


def _start(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LATEST_START:
        raise ValueError(f"start_timestamp is {_shown(value)}, not Unix seconds")
    return float(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class _Registration:
    """What one keyspace says of one address. `node` is the last one that could be read."""

    info: bytes | None = None
    ttl: bool = False
    node: Node | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What follows from all registrations of one address."""

    node: Node | None = None
    foreign: str | None = None
    problem: str = ""


class Registry:
    """Every registration of one cluster, kept up to date change by change: only changed keys are parsed."""

    def __init__(self, keyspace: str = NO_KEYSPACE) -> None:
        """`keyspace`: the one whose nodes are served."""
        self._served = keyspace
        self._registrations: dict[str, dict[str, _Registration]] = {}  # address -> keyspace -> ...
        self._strays: dict[str, str] = {}  # keys that are no registration -> why not
        self._verdicts: dict[str, _Verdict] = {}
        self._nodes: dict[str, Node] = {}
        self._foreign: dict[str, str] = {}
        self._problems: tuple[Problem, ...] | None = ()  # None: to be put together again

    def replace(self, entries: Mapping[str, bytes]) -> bool:
        """Take a whole listing; whether anything is different now."""
        gone = [Change(key, None) for key in self._keys() if key not in entries]
        return self.apply([*gone, *(Change(key, value) for key, value in entries.items())])

    def apply(self, changes: Iterable[Change]) -> bool:
        """Take changes in their order; whether the topology is different now."""
        different = False
        touched: dict[str, None] = {}
        for change in changes:
            located = locate(change.key)
            if located is None:
                continue
            keyspace, rest = located
            try:
                address, field = parse_leaf(rest)
            except ValueError as error:
                if keyspace == self._served:
                    different |= self._stray(change.key, None if change.value is None else str(error))
                continue
            if self._register(address, keyspace, field, change.value):
                touched[address] = None
        for address in touched:
            different |= self._judge(address)
        return different

    def topology(self, *, complete: bool, outage: str) -> Topology:
        """What all of it says. Later changes do not show in it."""
        if self._problems is None:
            told = self._strays | {
                _key(self._served, address): verdict.problem
                for address, verdict in self._verdicts.items()
                if verdict.problem
            }
            self._problems = tuple(Problem(Source.PD, key, reason) for key, reason in sorted(told.items()))
        return Topology(
            source=Source.PD,
            nodes=MappingProxyType(dict(self._nodes)),
            foreign=MappingProxyType(dict(self._foreign)),
            problems=self._problems,
            complete=complete,
            outage=outage,
        )

    def _keys(self) -> Iterable[str]:
        yield from self._strays
        for address, registrations in self._registrations.items():
            for keyspace, registration in registrations.items():
                if registration.info is not None:
                    yield _key(keyspace, address)
                if registration.ttl:
                    yield _key(keyspace, address, "ttl")

    def _stray(self, key: str, reason: str | None) -> bool:
        if self._strays.get(key) == reason:
            return False
        if reason is None:
            del self._strays[key]
        else:
            self._strays[key] = reason
        self._problems = None
        return True

    def _register(self, address: str, keyspace: str, field: str, value: bytes | None) -> bool:
        """Note one key; whether that is news. Other fields than these two are none of ours."""
        registrations = self._registrations.get(address, {})
        before = registrations.get(keyspace, _Registration())
        if field == "ttl":
            after = replace(before, ttl=value is not None)
        elif field != "info" or value == before.info:
            return False
        elif value is None:
            after = _Registration(ttl=before.ttl)
        elif keyspace != self._served:
            after = replace(before, info=value)
        else:
            after = _read(address, value, before)
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

    def _judge(self, address: str) -> bool:
        before = self._verdicts.get(address, _Verdict())
        after = _judged(self._registrations.get(address, {}), self._served)
        if after == before:
            return False
        if after == _Verdict():
            del self._verdicts[address]
        else:
            self._verdicts[address] = after
        if after.node is None:
            self._nodes.pop(address, None)
        else:
            self._nodes[address] = after.node
        if after.foreign is None:
            self._foreign.pop(address, None)
        else:
            self._foreign[address] = after.foreign
        if after.problem != before.problem:
            self._problems = None
        return True


def _read(address: str, value: bytes, before: _Registration) -> _Registration:
    try:
        return _Registration(value, before.ttl, parse_info(address, value))
    except ValueError as error:
        # A node that was readable stays what it was: a slip in its entry must not take it out of service.
        kept = "; what it said before stays in force" if before.node else ""
        return _Registration(value, before.ttl, before.node, f"{error}{kept}")


def _judged(registrations: Mapping[str, _Registration], served: str) -> _Verdict:
    """What the registrations of one address by keyspace mean when the keyspace `served` is served.

    `info` of another keyspace may be years old, `ttl` is not: a server that lives there shows that keyspace's
    data to whoever is routed to it, whatever an entry of ours still says of the same address.
    """
    ours = registrations.get(served, _Registration())
    others = sorted(keyspace for keyspace in registrations if keyspace != served)
    alive = [keyspace for keyspace in others if registrations[keyspace].ttl]
    if ours.info is None:
        return _Verdict(foreign=next(iter(alive or others), None))
    if alive:
        other = f"keyspace {alive[0]}" if alive[0] else "no keyspace"
        return _Verdict(
            foreign=alive[0],
            problem=f"nothing is routed to this address, since a server of {other} lives there, too;"
            " delete the entry that is out of date",
        )
    node = replace(ours.node, registered=ours.ttl) if ours.node else None
    return _Verdict(node=node, problem=ours.problem)


def _key(keyspace: str, address: str, field: str = "info") -> str:
    above = f"{KEYSPACES_PREFIX}{keyspace}" if keyspace else ""
    return f"{above}{TIDB_PREFIX}{address}/{field}"
