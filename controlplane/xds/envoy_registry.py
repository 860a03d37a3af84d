"""Who is connected, who was, and what each Envoy said last. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.clock import Clock
from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.xds.resources.profile import EnvoyProfile, FilterSetting
from controlplane.xds.snapshot_cache import SnapshotCache
from controlplane.xds.stream import Stream, StreamNack

RETENTION_SECONDS = 600.0  # seconds for which an Envoy is remembered after it disconnected


@dataclass(slots=True)
class _EnvoyRecord:
    current_stream: (
        Stream  # the one that speaks for the Envoy: the youngest that is open, else the last that was
    )
    connected_since: float
    open_streams: list[Stream] = field(default_factory=list)  # oldest first
    disconnected_at: float = 0.0
    last_nack: Nack | None = None
    nacks: int = 0
    problem: str = ""  # the latest that was told


class EnvoyRegistry:
    """The Envoys by id. `on_event` is called with kind, subject (the id) and a sentence."""

    def __init__(self, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        self._clock = clock
        self._on_event = on_event
        self._records: dict[str, _EnvoyRecord] = {}

    def set_filter(self, filter_setting: FilterSetting) -> None:
        """Hand a changed setting of the filter on to all streams."""
        for member in self._records.values():
            for stream in member.open_streams:
                stream.set_filter(filter_setting)

    def profiles(self) -> set[EnvoyProfile]:
        """The classes of all Envoys that are connected."""
        return {stream.profile for member in self._records.values() for stream in member.open_streams}

    def add_stream(self, stream: Stream) -> None:
        """A stream has begun."""
        name = stream.envoy_node.id
        member = self._records.setdefault(name, _EnvoyRecord(stream, self._clock()))
        if member.open_streams:
            self._on_event(
                "envoy.duplicate",
                name,
                f"{stream.address} opened a stream as {name} while one from {member.current_stream.address} is open;"
                " if these are two Envoys, give each a node.id of its own",
            )
        else:
            member.connected_since = self._clock()
            version = stream.envoy_node.version or "of unknown version"
            message = f"Envoy {version} connected from {stream.address}"
            self._on_event("envoy.connected", name, message)
        member.open_streams.append(stream)
        member.current_stream = stream

    def remove_stream(self, stream: Stream) -> None:
        """A stream has ended."""
        name = stream.envoy_node.id
        member = self._records[name]
        member.open_streams.remove(stream)
        if member.open_streams:
            member.current_stream = member.open_streams[-1]
        else:
            member.disconnected_at = self._clock()
            self._on_event("envoy.disconnected", name, f"the stream from {stream.address} ended")

    def record_nack(self, stream: Stream, stream_nack: StreamNack) -> None:
        """An Envoy has refused what it was sent."""
        name = stream.envoy_node.id
        nack = Nack(self._clock(), stream_nack.kind.url, stream_nack.version, stream_nack.message)
        member = self._records[name]
        member.last_nack = nack
        member.nacks += 1
        self._on_event(
            "envoy.nack",
            name,
            f"refused the {stream_nack.kind.display_name} of version {stream_nack.version}: {stream_nack.message}",
        )
        if stream_nack.fallback is not None:
            self._on_event(
                "envoy.filter_fallback",
                name,
                f"refused its first {stream_nack.kind.display_name}, so it gets one with filter:"
                f" {stream_nack.fallback.filter}",
            )

    def check_problem(self, stream: Stream, snapshots: SnapshotCache) -> None:
        """Tell of a stream's problem when it is a new one."""
        member = self._records[stream.envoy_node.id]
        problem = stream.problem(snapshots)
        if stream is member.current_stream and problem != member.problem:
            member.problem = problem
            if problem:
                self._on_event("envoy.problem", stream.envoy_node.id, problem)

    def statuses(self, snapshots: SnapshotCache) -> list[EnvoyStatus]:
        """Every Envoy that is connected or was in the last ten minutes, by id."""
        now = self._clock()
        for name, member in list(self._records.items()):
            if not member.open_streams and member.disconnected_at < now - RETENTION_SECONDS:
                del self._records[name]
        return [_status(member, snapshots, now) for _, member in sorted(self._records.items())]


def _status(member: _EnvoyRecord, snapshots: SnapshotCache, now: float) -> EnvoyStatus:
    stream = member.current_stream
    return EnvoyStatus(
        id=stream.envoy_node.id,
        address=stream.address,
        version=stream.envoy_node.version,
        filter=stream.active_filter(snapshots),
        group=stream.envoy_node.group,
        zone=stream.envoy_node.zone,
        module_version=stream.envoy_node.capabilities.module_version,
        problem=stream.problem(snapshots),
        connected_since=member.connected_since if member.open_streams else None,
        # While it is open, keepalive answers for the Envoy.
        last_seen=now if member.open_streams else member.disconnected_at,
        acked_version=stream.acked_version(snapshots),
        published_version=stream.published_version(snapshots),
        eds_acked=stream.eds_acked(snapshots),
        streams=len(member.open_streams),
        stale_resources=stream.stale_resources(snapshots),
        last_nack=member.last_nack,
        nacks=member.nacks,
        certificate_expires_at=stream.certificate_until,
    )
