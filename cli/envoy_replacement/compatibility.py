"""Whether an Envoy can take over from another one, and what a recycle has to do. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from cli.envoy_replacement.model import EnvoyState, RegisteredEnvoy, ReplacementSpec
from controlplane import address as addresses

_FILTERS_BEST_FIRST = ("module", "contrib", "none")


def permanent_problems(old: EnvoyState, new: EnvoyState) -> tuple[str, ...]:
    """Why these two cannot be meant: no waiting makes that good."""
    if old.id == new.id:
        return (
            f"both admin ports are of an Envoy with the id {old.id}: name two, and start the new one with an"
            " id of its own (--service-node)",
        )
    if new.has_stopped_accepting:
        return (
            f"the new Envoy {new.id} was told earlier to accept no sessions; if the two are not swapped, end"
            " it and start it again",
        )
    return ()


def takeover_blockers(
    old: EnvoyState,
    new: EnvoyState | None,
    registered: Mapping[str, RegisteredEnvoy],
    optional_listeners: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Why the new one cannot take over now, as sentences; empty: it can."""
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
        yield f"{new.id} lacks what {old.id} has: {names} (--without NAME when nobody needs it any more)"


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
        yield f"{new.id} has not acknowledged {new_entry.published_version}, which is published"
    if new_entry.stale_resources:
        yield f"{new.id} runs older settings itself: {', '.join(new_entry.stale_resources)}"
    if old_entry is None:
        return
    if _filter_rank(new_entry.filter) > _filter_rank(old_entry.filter):
        yield f"{new.id} has the filter {new_entry.filter}, and {old.id} has {old_entry.filter}"
    if new_entry.group != old_entry.group:
        yield f"{new.id} serves {_group_text(new_entry)}, and {old.id} serves {_group_text(old_entry)}"


def _filter_rank(name: str) -> int:
    return _FILTERS_BEST_FIRST.index(name) if name in _FILTERS_BEST_FIRST else len(_FILTERS_BEST_FIRST)


def _group_text(envoy: RegisteredEnvoy) -> str:
    return f"the group {envoy.group}" if envoy.group else "all groups"


def shares_a_port(old: EnvoyState, new: EnvoyState | None) -> bool:
    """Whether both listen at one address, where the kernel deals connections out; so it is taken to be before
    there is a new one."""
    return new is None or bool(set(old.listeners.values()) & set(new.listeners.values()))


def warnings(old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> tuple[str, ...]:
    """What an operator should know first. `migrates`: whether the kernel hands waiting connections on
    (net.ipv4.tcp_migrate_req); None: not known."""
    texts = []
    if kernel_migrates is False and not old.has_stopped_accepting and shares_a_port(old, new):
        texts.append(
            "connections that wait to be accepted when the old Envoy closes its port will be reset:"
            " `sysctl -w net.ipv4.tcp_migrate_req=1` first, and the kernel hands them to the new one"
        )
    if new is not None and not old.has_stopped_accepting:
        uncovered = sorted(set(old.listeners.values()) - set(new.listeners.values()))
        if uncovered and new.listeners:
            texts.append(
                f"nobody accepts at {', '.join(uncovered)} when {old.id} has closed its port: clients have to be"
                f" led to {', '.join(sorted(new.listeners.values()))}"
            )
    return tuple(texts)


def describe_steps(spec: ReplacementSpec, old: EnvoyState, new: EnvoyState | None) -> Iterator[str]:
    """What a recycle would do from here on, as sentences without a subject."""
    if new is None:
        yield f"start the new Envoy: {' '.join(spec.start_command)}"
        yield f"wait until it is ready and runs what is published, for {spec.start_timeout:g} s at most"
    if not old.has_stopped_accepting:
        listens = ", ".join(sorted(old.listeners.values()))
        yield f"let {old.id} accept no new sessions at {listens or 'any port'}"
    yield f"wait until its sessions are gone ({old.sessions} now), for {spec.deadline:g} s at most"
    if spec.on_deadline == "cut":
        yield "cut what is left then"
    else:
        yield "leave what is left then alone, and fail"
    yield f"end {old.id}: {' '.join(spec.stop_command) or f'POST /quitquitquit at {spec.old_admin}'}"
    yield f"tell the control plane that {old.id} is no more"


def is_same_process(previous: EnvoyState, current: EnvoyState) -> bool:
    """Whether these are of one process: none grows younger, or accepts again."""
    return (
        current.id == previous.id
        and current.uptime_seconds >= previous.uptime_seconds
        and current.has_stopped_accepting >= previous.has_stopped_accepting
    )


def parse_envoy_state(
    info: Mapping[str, Any], listeners: Mapping[str, Any], stats: Mapping[str, Any]
) -> EnvoyState:
    """What an Envoy's `/server_info`, `/listeners` and `/stats` (all as JSON) tell together.

    KeyError, TypeError, ValueError when that is no Envoy's answer.
    """
    counts = {each["name"]: int(each["value"]) for each in stats["stats"] if "value" in each}
    return EnvoyState(
        id=str(info["node"].get("id", "")),
        version=str(info["version"]).split("/")[1] if "/" in info["version"] else str(info["version"]),
        is_live=info["state"] == "LIVE",
        uptime_seconds=float(info["uptime_current_epoch"].removesuffix("s")),
        listeners={
            each["name"]: _join_address(each["local_address"]["socket_address"])
            for each in listeners.get("listener_statuses", [])
            if "socket_address" in each["local_address"]
        },
        has_stopped_accepting=counts.get("listener_manager.listener_stopped", 0) > 0,
        sessions=sum(count for name, count in counts.items() if _is_client_gauge(name)),
    )


def _join_address(socket_address: Mapping[str, Any]) -> str:
    return addresses.join(str(socket_address["address"]), int(socket_address["port_value"]))


def _is_client_gauge(name: str) -> bool:
    """Whether a gauge counts connections of clients: one a listener, not its workers' parts of that.

    And those that clients have left, while their last bytes are still on their way to a node.
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
    """An entry of `GET /v1/envoys`."""
    since = envoy["connected_since"]
    problems = [envoy["problem"]] if envoy["problem"] else []
    # What an earlier Envoy of that id refused is none of this one's.
    if (nack := envoy["last_nack"]) and _is_since_connect(nack, since):
        problems.append(f"it refused {nack['type_url']}: {nack['message']}")
    if (refusal := envoy["refusal"]) and _is_since_connect(refusal, since):
        problems.append(f"its module refused its {refusal['extension']}: {refusal['text']}")
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
    """Whole seconds until the deadline, never under 0."""
    return max(0, math.ceil(deadline - now))
