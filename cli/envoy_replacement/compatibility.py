"""Decide whether an Envoy can take over from another one, and parse what both report. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from cli.envoy_replacement.model import EnvoyState, RegisteredEnvoy, ReplacementSpec
from controlplane import address as addresses

_FILTERS_BEST_FIRST = ("module", "contrib", "none")


def permanent_problems(old: EnvoyState, new: EnvoyState) -> tuple[str, ...]:
    """Return why `new` can never replace `old`, however long the command waits."""
    if old.id == new.id:
        return (
            f"both admin ports belong to an Envoy with the id {old.id}: name two different Envoys, and start"
            " the new one with its own id (--service-node)",
        )
    if new.has_stopped_accepting:
        return (
            f"the new Envoy {new.id} has already stopped accepting sessions; if --old-admin and --new-admin"
            " are"
            " not swapped, restart it",
        )
    return ()


def takeover_blockers(
    old: EnvoyState,
    new: EnvoyState | None,
    registered: Mapping[str, RegisteredEnvoy],
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
        yield f"{new.id} lacks listeners that {old.id} has: {names} (--without NAME if nobody needs them)"


def _registration_blockers(
    old: EnvoyState, new: EnvoyState, registered: Mapping[str, RegisteredEnvoy]
) -> Iterator[str]:
    new_entry, old_entry = registered.get(new.id), registered.get(old.id)
    if new_entry is None or not new_entry.is_connected:
        yield f"{new.id} is not connected to the control plane"
        return
    for problem in new_entry.problems:
        yield f"{new.id}: {problem}"
    if not new_entry.published_version:
        yield "the control plane has published nothing yet"
    elif new_entry.acked_version != new_entry.published_version:
        yield f"{new.id} has not acknowledged the published version {new_entry.published_version}"
    if new_entry.stale_resources:
        yield f"{new.id} itself uses older settings: {', '.join(new_entry.stale_resources)}"
    if old_entry is None:
        return
    if _filter_rank(new_entry.filter) > _filter_rank(old_entry.filter):
        yield f"{new.id} has the filter {new_entry.filter}, but {old.id} has {old_entry.filter}"
    if new_entry.group != old_entry.group:
        yield f"{new.id} serves {_group_text(new_entry)}, but {old.id} serves {_group_text(old_entry)}"


def _filter_rank(name: str) -> int:
    return _FILTERS_BEST_FIRST.index(name) if name in _FILTERS_BEST_FIRST else len(_FILTERS_BEST_FIRST)


def _group_text(envoy: RegisteredEnvoy) -> str:
    return f"the group {envoy.group}" if envoy.group else "all groups"


def shares_a_port(old: EnvoyState, new: EnvoyState | None) -> bool:
    """Return whether both listen on a common address, where the kernel distributes connections.

    True if there is no new Envoy yet.
    """
    return new is None or bool(set(old.listeners.values()) & set(new.listeners.values()))


def warnings(old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> tuple[str, ...]:
    """Return warnings for the operator.

    `kernel_migrates`: whether the kernel hands queued connections to another listener of the same port
    (net.ipv4.tcp_migrate_req); None if unknown.
    """
    texts = []
    if kernel_migrates is False and not old.has_stopped_accepting and shares_a_port(old, new):
        texts.append(
            "connections in the accept queue when the old Envoy closes its port will be reset: run"
            " `sysctl -w net.ipv4.tcp_migrate_req=1` first, so that the kernel hands them to the new Envoy"
        )
    if new is not None and not old.has_stopped_accepting:
        uncovered = sorted(set(old.listeners.values()) - set(new.listeners.values()))
        if uncovered and new.listeners:
            texts.append(
                f"nobody accepts connections at {', '.join(uncovered)} after {old.id} has closed its port:"
                " direct"
                f" clients to {', '.join(sorted(new.listeners.values()))}"
            )
    return tuple(texts)


def describe_steps(spec: ReplacementSpec, old: EnvoyState, new: EnvoyState | None) -> Iterator[str]:
    """Yield what a replacement would do from here on, as sentences without a subject."""
    if new is None:
        yield f"start the new Envoy: {' '.join(spec.start_command)}"
        yield f"wait until it is ready and runs the published version, for at most {spec.start_timeout:g} s"
    if not old.has_stopped_accepting:
        listen_addresses = ", ".join(sorted(old.listeners.values()))
        yield f"make {old.id} stop accepting sessions at {listen_addresses or 'any port'}"
    yield f"wait until its sessions have ended ({old.sessions} now), for at most {spec.deadline:g} s"
    if spec.on_deadline == "cut":
        yield "cut the sessions that are left then"
    else:
        yield "keep the sessions that are left then, and fail"
    yield f"stop {old.id}: {' '.join(spec.stop_command) or f'POST /quitquitquit at {spec.old_admin}'}"
    yield f"remove {old.id} from the control plane"


def is_same_process(previous: EnvoyState, current: EnvoyState) -> bool:
    """Return whether both states are of one process: it never reduces its uptime or accepts again."""
    return (
        current.id == previous.id
        and current.uptime_seconds >= previous.uptime_seconds
        and current.has_stopped_accepting >= previous.has_stopped_accepting
    )


def parse_envoy_state(
    info: Mapping[str, Any], listeners: Mapping[str, Any], stats: Mapping[str, Any]
) -> EnvoyState:
    """Combine the JSON of an Envoy's `/server_info`, `/listeners` and `/stats`.

    Raises KeyError, TypeError or ValueError if they are not responses of an Envoy.
    """
    values = {stat["name"]: int(stat["value"]) for stat in stats["stats"] if "value" in stat}
    return EnvoyState(
        id=str(info["node"].get("id", "")),
        version=str(info["version"]).split("/")[1] if "/" in info["version"] else str(info["version"]),
        is_live=info["state"] == "LIVE",
        uptime_seconds=float(info["uptime_current_epoch"].removesuffix("s")),
        listeners={
            listener["name"]: _join_address(listener["local_address"]["socket_address"])
            for listener in listeners.get("listener_statuses", [])
            if "socket_address" in listener["local_address"]
        },
        has_stopped_accepting=values.get("listener_manager.listener_stopped", 0) > 0,
        sessions=sum(value for name, value in values.items() if _is_client_gauge(name)),
    )


def _join_address(socket_address: Mapping[str, Any]) -> str:
    return addresses.join(str(socket_address["address"]), int(socket_address["port_value"]))


def _is_client_gauge(name: str) -> bool:
    """Return whether a gauge counts client connections: those of a listener, not those of one worker.

    Also true for connections that the client has closed while their last bytes are still sent to a node.
    """
    head, *_, last = parts = name.split(".")
    if head == "tcp":
        return last == "upstream_flush_active"
    if (
        head != "listener"
        or parts[1] == "admin"
        or last not in ("downstream_cx_active", "downstream_pre_cx_active")
    ):
        return False
    return not parts[-2].startswith(("worker_", "main_thread"))


def parse_registered_envoy(envoy: Mapping[str, Any]) -> RegisteredEnvoy:
    """Parse an entry of `GET /v1/envoys`."""
    since = envoy["connected_since"]
    problems = [envoy["problem"]] if envoy["problem"] else []
    # A rejection before the current connection came from an earlier Envoy with the same id.
    if (nack := envoy["last_nack"]) and _is_since_connect(nack, since):
        problems.append(f"it rejected {nack['type_url']}: {nack['message']}")
    if (rejection := envoy["refusal"]) and _is_since_connect(rejection, since):
        problems.append(
            f"its module rejected the configuration of `{rejection['extension']}`: {rejection['text']}"
        )
    return RegisteredEnvoy(
        id=envoy["id"],
        is_connected=since is not None,
        acked_version=envoy["acked_version"],
        published_version=envoy["published_version"],
        filter=envoy["filter"],
        group=envoy["group"],
        problems=tuple(problems),
        stale_resources=tuple(envoy["outdated"]),
    )


def _is_since_connect(rejection: Mapping[str, Any], since: str | None) -> bool:
    return since is not None and datetime.fromisoformat(rejection["at"]) >= datetime.fromisoformat(since)


def seconds_left(deadline: float, now: float) -> int:
    """Return the whole seconds until the deadline, at least 0."""
    return max(0, math.ceil(deadline - now))
