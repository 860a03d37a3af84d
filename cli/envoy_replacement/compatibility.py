"""Decide whether an Envoy can take over from another one. No I/O.

The arguments `registered` contain the entries of `GET /v1/envoys` by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from cli.envoy_replacement.envoy_admin import EnvoyState

_FILTERS_BEST_FIRST = ("module", "contrib", "none")


def permanent_problem(old: EnvoyState, new: EnvoyState) -> str:
    """Return why `new` can never replace `old`, however long the command waits; empty if it can."""
    if old.id == new.id:
        return (
            f"both admin ports belong to an Envoy with the id {old.id}: name two different Envoys, and start"
            " the new one with its own id (--service-node)"
        )
    if new.has_stopped_accepting:
        return (
            f"the new Envoy {new.id} has already stopped accepting sessions; if --old-admin and --new-admin"
            " are not swapped, restart it"
        )
    return ""


def takeover_blockers(
    old: EnvoyState,
    new: EnvoyState | None,
    registered: Mapping[str, Mapping[str, Any]],
    optional_listeners: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Return why the new Envoy cannot take over now, as sentences; empty if it can."""
    if new is None:
        return ("the new Envoy's admin port does not answer",)
    return (*_admin_blockers(old, new, optional_listeners), *_registration_blockers(old, new, registered))


def _admin_blockers(old: EnvoyState, new: EnvoyState, optional_listeners: frozenset[str]) -> Iterator[str]:
    if not new.is_live:
        yield f"{new.id} is not ready"
    if not new.listeners:
        yield f"{new.id} has no listener"
    elif missing := sorted(old.listeners.keys() - new.listeners.keys() - optional_listeners):
        names = ", ".join(missing)
        yield f"{new.id} lacks listeners that {old.id} has: {names} (--without NAME if no client needs them)"


def _registration_blockers(
    old: EnvoyState, new: EnvoyState, registered: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    entry, old_entry = registered.get(new.id), registered.get(old.id)
    if entry is None or entry["connected_since"] is None:
        yield f"{new.id} is not connected to the control plane"
        return
    if entry["problem"]:
        yield f"{new.id}: {entry['problem']}"
    if (nack := entry["last_nack"]) and _is_since_connect(nack, entry):
        yield f"{new.id}: it rejected {nack['type_url']}: {nack['message']}"
    if (rejection := entry["config_rejection"]) and _is_since_connect(rejection, entry):
        extension, text = rejection["extension"], rejection["text"]
        yield f"{new.id}: its module rejected the configuration of `{extension}`: {text}"
    if not entry["published_version"]:
        yield "the control plane has published nothing yet"
    elif entry["acked_version"] != entry["published_version"]:
        yield f"{new.id} has not acknowledged the published version {entry['published_version']}"
    if entry["stale_resources"]:
        outdated = entry.get("stale_settings") or entry["stale_resources"]
        yield f"{new.id} itself uses older settings: {', '.join(outdated)}"
    if old_entry is None:
        return
    if _filter_rank(entry["filter"]) > _filter_rank(old_entry["filter"]):
        yield f"{new.id} has the filter {entry['filter']}, but {old.id} has {old_entry['filter']}"
    if entry["group"] != old_entry["group"]:
        yield f"{new.id} serves {_group_text(entry)}, but {old.id} serves {_group_text(old_entry)}"


def _is_since_connect(rejection: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return False for a rejection that came from an earlier Envoy with the same id."""
    at, since = rejection["at"], entry["connected_since"]
    return datetime.fromisoformat(at) >= datetime.fromisoformat(since)


def _filter_rank(name: str) -> int:
    return _FILTERS_BEST_FIRST.index(name) if name in _FILTERS_BEST_FIRST else len(_FILTERS_BEST_FIRST)


def _group_text(entry: Mapping[str, Any]) -> str:
    return f"the group {entry['group']}" if entry["group"] else "all groups"


def warnings(old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> tuple[str, ...]:
    """Return warnings for the operator.

    `kernel_migrates` says whether the kernel hands queued connections to another listener of the same port
    (net.ipv4.tcp_migrate_req); None if unknown.
    """
    texts = []
    # The kernel distributes connections among the processes that listen on the same address.
    shares_a_port = new is None or set(old.listeners.values()) & set(new.listeners.values())
    if kernel_migrates is False and not old.has_stopped_accepting and shares_a_port:
        texts.append(
            "connections in the accept queue when the old Envoy closes its port will be reset: run"
            " `sysctl -w net.ipv4.tcp_migrate_req=1` first, so that the kernel hands them to the new Envoy"
        )
    if new is not None and not old.has_stopped_accepting:
        uncovered = sorted(set(old.listeners.values()) - set(new.listeners.values()))
        if uncovered and new.listeners:
            texts.append(
                f"no Envoy accepts connections at {', '.join(uncovered)} after {old.id} has closed its port:"
                f" direct clients to {', '.join(sorted(new.listeners.values()))}"
            )
    return tuple(texts)


def may_be_same_process(previous: EnvoyState, current: EnvoyState) -> bool:
    """Return whether one process can have both states: its uptime never decreases, its ports never reopen."""
    return (
        current.id == previous.id
        and current.uptime_seconds >= previous.uptime_seconds
        and current.has_stopped_accepting >= previous.has_stopped_accepting
    )
