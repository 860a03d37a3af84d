"""The Envoys of all replicas as one fleet. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.plan import Stamp

_DUPLICATE_AFTER_SECONDS = 20.0  # seconds: a replica notices within 15 that an Envoy has vanished


@dataclass(frozen=True, slots=True)
class ReplicaFleet:
    """The Envoys that are connected to one replica, or were lately; all times by our clock.

    `stamp` is of the plan that this replica offers them; None: of none.
    """

    statuses: tuple[EnvoyStatus, ...] = ()
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class ReplicaEnvoy:
    """An Envoy, and the replica that speaks for it. `endpoints_acked` is about the plan of `stamp`."""

    status: EnvoyStatus
    replica: str
    stamp: Stamp | None = None


def merge_fleets(fleets: Mapping[str, ReplicaFleet]) -> list[ReplicaEnvoy]:
    """Every Envoy once, by id; `fleets` by replica.

    The youngest connection speaks: the other is what the Envoy has left and nobody has noticed yet. Still
    both count as `streams`, for they may be of two Envoys that share an id, and then neither speaks for both.
    """
    found: dict[str, list[ReplicaEnvoy]] = {}
    for replica, fleet in fleets.items():
        for status in fleet.statuses:
            found.setdefault(status.id, []).append(ReplicaEnvoy(status, replica, fleet.stamp))
    return [_merge(found[envoy]) for envoy in sorted(found)]


def carry_over_missing(before: ReplicaFleet | None, fleet: ReplicaFleet, at: float) -> ReplicaFleet:
    """A replica's fleet as it tells it now, and Envoys that it told of before and names no more.

    Those a replica forgets that starts anew, before they have come back to it or to another.
    """
    named = {status.id for status in fleet.statuses}
    missing = [s for s in (before.statuses if before is not None else ()) if s.id not in named]
    if not missing:
        return fleet
    return replace(fleet, statuses=(*fleet.statuses, *(_disconnected(status, at) for status in missing)))


def mark_disconnected(fleet: ReplicaFleet, disconnected_at: float) -> ReplicaFleet:
    """What is left of a replica's fleet when it has not been heard of since then."""
    return ReplicaFleet(tuple(_disconnected(status, disconnected_at) for status in fleet.statuses))


def without_expired(fleet: ReplicaFleet, expired_before: float) -> ReplicaFleet:
    """It without Envoys that are gone and were seen last before that time."""
    kept = tuple(s for s in fleet.statuses if s.connected_since is not None or s.last_seen >= expired_before)
    return fleet if len(kept) == len(fleet.statuses) else replace(fleet, statuses=kept)


class DuplicateIdDetector:
    """Finds Envoys that share an id and are connected to different replicas.

    One that goes from one replica to another has streams at both for a moment, or until the old one notices.
    """

    def __init__(self) -> None:
        self._shared_since: dict[str, float] = {}
        self._reported: set[str] = set()

    def check(self, fleets: Mapping[str, ReplicaFleet], now: float) -> list[tuple[str, str]]:
        """Ids that are seen to be shared, each once as long as it is, with a sentence."""
        replicas_by_envoy: dict[str, list[str]] = {}
        for replica, fleet in fleets.items():
            for status in fleet.statuses:
                if status.connected_since is not None:
                    replicas_by_envoy.setdefault(status.id, []).append(replica)
        shared = {envoy: replicas for envoy, replicas in replicas_by_envoy.items() if len(replicas) > 1}
        self._shared_since = {envoy: self._shared_since.get(envoy, now) for envoy in shared}
        found = [
            e
            for e in sorted(shared)
            if now - self._shared_since[e] >= _DUPLICATE_AFTER_SECONDS and e not in self._reported
        ]
        self._reported = (self._reported & shared.keys()) | set(found)
        return [
            (
                envoy,
                f"the control planes {' and '.join(sorted(shared[envoy]))} have each had an open stream of"
                f" {envoy} for {_DUPLICATE_AFTER_SECONDS:g} s; if these are two Envoys, give each a node.id of its own",
            )
            for envoy in found
        ]


def _merge(candidates: list[ReplicaEnvoy]) -> ReplicaEnvoy:
    if len(candidates) == 1:
        return candidates[0]
    newest = max(candidates, key=_recency_key)
    nacks = [placed.status.last_nack for placed in candidates if placed.status.last_nack is not None]
    status = replace(
        newest.status,
        streams=sum(placed.status.streams for placed in candidates),
        last_seen=max(placed.status.last_seen for placed in candidates),
        last_nack=max(nacks, key=lambda nack: nack.at, default=None),
        nacks=sum(placed.status.nacks for placed in candidates),
    )
    return replace(newest, status=status)


def _recency_key(placed: ReplicaEnvoy) -> tuple[float, float, str]:
    since = placed.status.connected_since
    return (float("-inf") if since is None else since, placed.status.last_seen, placed.replica)


def _disconnected(status: EnvoyStatus, at: float) -> EnvoyStatus:
    """As it is when its stream has ended."""
    if status.connected_since is None:
        return status
    return replace(status, connected_since=None, last_seen=min(status.last_seen, at), streams=0)
