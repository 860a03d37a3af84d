"""Merges the Envoys of all replicas into one fleet. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.plan import Stamp

_DUPLICATE_AFTER_SECONDS = 20.0  # a replica detects within 15 s that an Envoy has vanished


@dataclass(frozen=True, slots=True)
class ReplicaFleet:
    """The Envoys that are or recently were connected to one replica; all times by our clock.

    `published_stamp` identifies the shared plan that the replica publishes to them; None if there is none.
    """

    statuses: tuple[EnvoyStatus, ...] = ()
    published_stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class ReplicaEnvoy:
    """An Envoy and the replica that reports it. Its acknowledged endpoints are those of the plan `stamp`."""

    status: EnvoyStatus
    replica: str
    stamp: Stamp | None = None


def merge_fleets(fleets: Mapping[str, ReplicaFleet]) -> list[ReplicaEnvoy]:
    """Return every Envoy once, sorted by id. `fleets` is keyed by replica.

    The newest connection wins: an older one is usually dead, but its replica has not detected that yet.
    All connections count as `streams`, because they may belong to several Envoys with the same id.
    """
    candidates: dict[str, list[ReplicaEnvoy]] = {}
    for replica, fleet in fleets.items():
        for status in fleet.statuses:
            candidates.setdefault(status.id, []).append(ReplicaEnvoy(status, replica, fleet.published_stamp))
    return [_merge(candidates[envoy]) for envoy in sorted(candidates)]


def add_missing_envoys(before: ReplicaFleet | None, fleet: ReplicaFleet, at: float) -> ReplicaFleet:
    """Return a replica's reported fleet plus the Envoys that it reported before but no longer does.

    A restarted replica does not know these Envoys until they reconnect to it or to another replica.
    """
    named = {status.id for status in fleet.statuses}
    known = before.statuses if before is not None else ()
    missing = tuple(_disconnected(status, at) for status in known if status.id not in named)
    return replace(fleet, statuses=(*fleet.statuses, *missing)) if missing else fleet


def mark_disconnected(fleet: ReplicaFleet, disconnected_at: float) -> ReplicaFleet:
    """Return the fleet of an unreachable replica: all its Envoys disconnected, without a stamp."""
    return ReplicaFleet(tuple(_disconnected(status, disconnected_at) for status in fleet.statuses))


def without_expired(fleet: ReplicaFleet, last_seen_before: float) -> ReplicaFleet:
    """Return the fleet without disconnected Envoys that were last seen before `last_seen_before`."""
    remaining = tuple(
        s for s in fleet.statuses if s.connected_since is not None or s.last_seen >= last_seen_before
    )
    return fleet if len(remaining) == len(fleet.statuses) else replace(fleet, statuses=remaining)


class DuplicateIdDetector:
    """Detects Envoys that share an id and are connected to different replicas.

    An Envoy that reconnects to another replica has two streams until the old replica detects the disconnect.
    """

    def __init__(self) -> None:
        self._shared_since: dict[str, float] = {}
        self._reported: set[str] = set()

    def check(self, fleets: Mapping[str, ReplicaFleet], now: float) -> list[tuple[str, str]]:
        """Return each newly detected shared id with a message."""
        replicas_by_envoy: dict[str, list[str]] = {}
        for replica in sorted(fleets):
            for status in fleets[replica].statuses:
                if status.connected_since is not None:
                    replicas_by_envoy.setdefault(status.id, []).append(replica)
        shared = {envoy: replicas for envoy, replicas in replicas_by_envoy.items() if len(replicas) > 1}
        self._shared_since = {envoy: self._shared_since.get(envoy, now) for envoy in shared}
        detected = [
            envoy
            for envoy, since in sorted(self._shared_since.items())
            if now - since >= _DUPLICATE_AFTER_SECONDS and envoy not in self._reported
        ]
        self._reported = self._reported & shared.keys() | set(detected)
        return [
            (
                envoy,
                f"the control planes {' and '.join(shared[envoy])} have each had an open stream of {envoy}"
                f" for {_DUPLICATE_AFTER_SECONDS:g} s; if these are two Envoys, give each its own node.id",
            )
            for envoy in detected
        ]


def _merge(candidates: list[ReplicaEnvoy]) -> ReplicaEnvoy:
    if len(candidates) == 1:
        return candidates[0]
    newest = max(candidates, key=_recency_key)
    nacks = [envoy.status.last_nack for envoy in candidates if envoy.status.last_nack is not None]
    status = replace(
        newest.status,
        streams=sum(envoy.status.streams for envoy in candidates),
        last_seen=max(envoy.status.last_seen for envoy in candidates),
        last_nack=max(nacks, key=lambda nack: nack.at, default=None),
        nacks=sum(envoy.status.nacks for envoy in candidates),
    )
    return replace(newest, status=status)


def _recency_key(envoy: ReplicaEnvoy) -> tuple[float, float, str]:
    since = envoy.status.connected_since
    return (float("-inf") if since is None else since, envoy.status.last_seen, envoy.replica)


def _disconnected(status: EnvoyStatus, at: float) -> EnvoyStatus:
    """Return the status of the Envoy after its stream has ended."""
    if status.connected_since is None:
        return status
    return replace(status, connected_since=None, last_seen=min(status.last_seen, at), streams=0)
