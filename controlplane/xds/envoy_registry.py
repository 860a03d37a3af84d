"""Keeps the streams, NACKs and problems of Envoys that are, or recently were, connected. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.clock import Clock
from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.xds.resources.profile import EnvoyProfile, FilterSetting
from controlplane.xds.snapshot_cache import SnapshotCache
from controlplane.xds.stream import Stream, StreamNack

RETENTION_SECONDS = 600.0  # an Envoy is remembered for this long after it disconnects


@dataclass(slots=True)
class _EnvoyRecord:
    current_stream: Stream  # the newest open stream; if none is open, the one that ended last
    connected_since: float
    open_streams: list[Stream] = field(default_factory=list)  # oldest first
    disconnected_at: float = 0.0
    last_nack: Nack | None = None
    nacks: int = 0
    problem: str = ""  # found by the last `check_problem`; empty if it found none


class EnvoyRegistry:
    """The Envoys by id. `on_event` gets the kind, subject (the Envoy's id) and message of an event."""

    def __init__(self, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        self._clock = clock
        self._on_event = on_event
        self._records: dict[str, _EnvoyRecord] = {}

    def set_filter(self, filter_setting: FilterSetting) -> None:
        """Apply a changed filter setting to all streams."""
        for record in self._records.values():
            for stream in record.open_streams:
                stream.set_filter(filter_setting)

    def profiles(self, snapshots: SnapshotCache) -> set[EnvoyProfile]:
        """Return the profiles of all connected Envoys, with their switches of the module in `snapshots`."""
        return {
            snapshots.profile_of(stream.profile, envoy)
            for envoy, record in self._records.items()
            for stream in record.open_streams
        }

    def add_stream(self, stream: Stream) -> None:
        """Add a stream that has just opened."""
        name = stream.envoy_node.id
        record = self._records.setdefault(name, _EnvoyRecord(stream, self._clock()))
        if record.open_streams:
            message = (
                f"{stream.address} opened a stream as {name} while one from {record.current_stream.address}"
                " is open; if these are two Envoys, give each a unique node.id"
            )
            self._on_event("envoy.duplicate", name, message)
        else:
            record.connected_since = self._clock()
            version = stream.envoy_node.version or "of unknown version"
            message = f"Envoy {version} connected from {stream.address}"
            self._on_event("envoy.connected", name, message)
        record.open_streams.append(stream)
        record.current_stream = stream

    def remove_stream(self, stream: Stream) -> None:
        """Remove a stream that has ended."""
        name = stream.envoy_node.id
        record = self._records[name]
        record.open_streams.remove(stream)
        if record.open_streams:
            record.current_stream = record.open_streams[-1]
        else:
            record.disconnected_at = self._clock()
            self._on_event("envoy.disconnected", name, f"the stream from {stream.address} ended")

    def record_nack(self, stream: Stream, stream_nack: StreamNack) -> None:
        """Record and report that an Envoy rejected a response."""
        name, rejected = stream.envoy_node.id, stream_nack.resource_type
        version, reason, next_profile = stream_nack.version, stream_nack.message, stream_nack.next_profile
        record = self._records[name]
        record.last_nack = Nack(self._clock(), rejected.url, version, reason)
        record.nacks += 1
        message = f"rejected the {rejected.display_name} of version {version}: {reason}"
        self._on_event("envoy.nack", name, message)
        if next_profile is not None:
            effect = f"so it gets one with filter: {next_profile.filter}"
            message = f"rejected its first {rejected.display_name}, {effect}"
            self._on_event("envoy.filter_fallback", name, message)

    def check_problem(self, stream: Stream, snapshots: SnapshotCache) -> None:
        """Emit an event if an Envoy has a new problem. Only its newest stream counts."""
        record = self._records[stream.envoy_node.id]
        problem = stream.problem(snapshots)
        if stream is record.current_stream and problem != record.problem:
            record.problem = problem
            if problem:
                self._on_event("envoy.problem", stream.envoy_node.id, problem)

    def statuses(self, snapshots: SnapshotCache) -> list[EnvoyStatus]:
        """Return the Envoys that are connected, or were in the last ten minutes, sorted by id."""
        now = self._clock()
        for name, record in list(self._records.items()):
            if not record.open_streams and record.disconnected_at < now - RETENTION_SECONDS:
                del self._records[name]
        return [_status(record, snapshots, now) for _, record in sorted(self._records.items())]


def _status(record: _EnvoyRecord, snapshots: SnapshotCache, now: float) -> EnvoyStatus:
    stream = record.current_stream
    return EnvoyStatus(
        id=stream.envoy_node.id,
        address=stream.address,
        version=stream.envoy_node.version,
        filter=stream.active_filter(snapshots),
        group=stream.envoy_node.group,
        zone=stream.envoy_node.zone,
        module_version=stream.envoy_node.module_version,
        problem=stream.problem(snapshots),
        connected_since=record.connected_since if record.open_streams else None,
        # While a stream is open, gRPC keepalive proves that the Envoy is alive.
        last_seen=now if record.open_streams else record.disconnected_at,
        acked_version=stream.acked_version(snapshots),
        published_version=stream.published_version(snapshots),
        has_acknowledged_endpoints=stream.has_acknowledged_endpoints(snapshots),
        streams=len(record.open_streams),
        stale_resources=stream.stale_resources(snapshots),
        stale_settings=stream.stale_settings(snapshots),
        last_nack=record.last_nack,
        nacks=record.nacks,
        certificate_expires_at=stream.certificate_until,
    )
