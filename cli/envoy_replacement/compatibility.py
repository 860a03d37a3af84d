"""Whether an Envoy can take over from another one, and what a recycle has to do. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from cli.envoy_replacement.model import Member, Order, Proxy
from controlplane import address as addresses

_BEST_FIRST = ("module", "contrib", "none")


def mistakes(old: Proxy, new: Proxy) -> tuple[str, ...]:
    """Why these two cannot be meant: no waiting makes that good."""
    if old.id == new.id:
        return (
            f"both admin ports are of an Envoy with the id {old.id}: name two, and start the new one with an"
            " id of its own (--service-node)",
        )
    if new.is_closed:
        return (
            f"the new Envoy {new.id} was told earlier to accept no sessions; if the two are not swapped, end"
            " it and start it again",
        )
    return ()


def hindrances(
    old: Proxy, new: Proxy | None, members: Mapping[str, Member], without: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Why the new one cannot take over now, as sentences; empty: it can."""
    if new is None:
        return ("the new Envoy's admin port does not answer",)
    return (*_of_its_own(old, new, without), *_by_the_control_plane(old, new, members))


def _of_its_own(old: Proxy, new: Proxy, without: frozenset[str]) -> Iterator[str]:
    if not new.is_live:
        yield f"{new.id} is not ready"
    if not new.listeners:
        yield f"{new.id} has no listener"
    elif lacking := sorted(old.listeners.keys() - new.listeners.keys() - without):
        names = ", ".join(lacking)
        yield f"{new.id} lacks what {old.id} has: {names} (--without NAME when nobody needs it any more)"


def _by_the_control_plane(old: Proxy, new: Proxy, members: Mapping[str, Member]) -> Iterator[str]:
    member, before = members.get(new.id), members.get(old.id)
    if member is None or not member.is_connected:
        yield f"{new.id} is not connected to the control plane"
        return
    for complaint in member.complaints:
        yield f"{new.id}: {complaint}"
    if not member.published:
        yield "the control plane has published nothing yet"
    elif member.acknowledged != member.published:
        yield f"{new.id} has not acknowledged {member.published}, which is published"
    if member.outdated:
        yield f"{new.id} runs older settings itself: {', '.join(member.outdated)}"
    if before is None:
        return
    if _rank(member.filter) > _rank(before.filter):
        yield f"{new.id} has the filter {member.filter}, and {old.id} has {before.filter}"
    if member.group != before.group:
        yield f"{new.id} serves {_group(member)}, and {old.id} serves {_group(before)}"


def _rank(name: str) -> int:
    return _BEST_FIRST.index(name) if name in _BEST_FIRST else len(_BEST_FIRST)


def _group(member: Member) -> str:
    return f"the group {member.group}" if member.group else "all groups"


def shares_a_port(old: Proxy, new: Proxy | None) -> bool:
    """Whether both listen at one address, where the kernel deals connections out; so it is taken to be before
    there is a new one."""
    return new is None or bool(set(old.listeners.values()) & set(new.listeners.values()))


def cautions(old: Proxy, new: Proxy | None, *, migrates: bool | None) -> tuple[str, ...]:
    """What an operator should know first. `migrates`: whether the kernel hands waiting connections on
    (net.ipv4.tcp_migrate_req); None: not known."""
    found = []
    if migrates is False and not old.is_closed and shares_a_port(old, new):
        found.append(
            "connections that wait to be accepted when the old Envoy closes its port will be reset:"
            " `sysctl -w net.ipv4.tcp_migrate_req=1` first, and the kernel hands them to the new one"
        )
    if new is not None and not old.is_closed:
        alone = sorted(set(old.listeners.values()) - set(new.listeners.values()))
        if alone and new.listeners:
            found.append(
                f"nobody accepts at {', '.join(alone)} when {old.id} has closed its port: clients have to be"
                f" led to {', '.join(sorted(new.listeners.values()))}"
            )
    return tuple(found)


def steps(order: Order, old: Proxy, new: Proxy | None) -> Iterator[str]:
    """What a recycle would do from here on, as sentences without a subject."""
    if new is None:
        yield f"start the new Envoy: {' '.join(order.start)}"
        yield f"wait until it is ready and runs what is published, for {order.start_timeout:g} s at most"
    if not old.is_closed:
        listens = ", ".join(sorted(old.listeners.values()))
        yield f"let {old.id} accept no new sessions at {listens or 'any port'}"
    yield f"wait until its sessions are gone ({old.sessions} now), for {order.deadline:g} s at most"
    if order.on_deadline == "cut":
        yield "cut what is left then"
    else:
        yield "leave what is left then alone, and fail"
    yield f"end {old.id}: {' '.join(order.stop) or f'POST /quitquitquit at {order.old}'}"
    yield f"tell the control plane that {old.id} is no more"


def is_same_run(before: Proxy, now: Proxy) -> bool:
    """Whether these are of one process: none grows younger, or accepts again."""
    return now.id == before.id and now.uptime >= before.uptime and now.is_closed >= before.is_closed


def proxy(info: Mapping[str, Any], listeners: Mapping[str, Any], stats: Mapping[str, Any]) -> Proxy:
    """What an Envoy's `/server_info`, `/listeners` and `/stats` (all as JSON) tell together.

    KeyError, TypeError, ValueError when that is no Envoy's answer.
    """
    counts = {each["name"]: int(each["value"]) for each in stats["stats"] if "value" in each}
    return Proxy(
        id=str(info["node"].get("id", "")),
        version=str(info["version"]).split("/")[1] if "/" in info["version"] else str(info["version"]),
        is_live=info["state"] == "LIVE",
        uptime=float(info["uptime_current_epoch"].removesuffix("s")),
        listeners={
            each["name"]: _address(each["local_address"]["socket_address"])
            for each in listeners.get("listener_statuses", [])
            if "socket_address" in each["local_address"]
        },
        is_closed=counts.get("listener_manager.listener_stopped", 0) > 0,
        sessions=sum(count for name, count in counts.items() if _counts_clients(name)),
    )


def _address(socket_address: Mapping[str, Any]) -> str:
    return addresses.join(str(socket_address["address"]), int(socket_address["port_value"]))


def _counts_clients(name: str) -> bool:
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


def member(envoy: Mapping[str, Any]) -> Member:
    """An entry of `GET /v1/envoys`."""
    since = envoy["connected_since"]
    complaints = [envoy["problem"]] if envoy["problem"] else []
    # What an earlier Envoy of that id refused is none of this one's.
    if (nack := envoy["last_nack"]) and _is_of(nack, since):
        complaints.append(f"it refused {nack['type_url']}: {nack['message']}")
    if (refusal := envoy["refusal"]) and _is_of(refusal, since):
        complaints.append(f"its module refused its {refusal['extension']}: {refusal['text']}")
    return Member(
        id=envoy["id"],
        is_connected=since is not None,
        acknowledged=envoy["acked_version"],
        published=envoy["published_version"],
        filter=envoy["filter"],
        group=envoy["group"],
        complaints=tuple(complaints),
        outdated=tuple(envoy["outdated"]),
    )


def _is_of(refused: Mapping[str, Any], since: str | None) -> bool:
    return since is not None and datetime.fromisoformat(refused["at"]) >= datetime.fromisoformat(since)


def left(deadline: float, now: float) -> int:
    """Whole seconds until the deadline, never under 0."""
    return max(0, math.ceil(deadline - now))
