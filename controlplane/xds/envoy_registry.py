"""Who is connected, who was, and what each Envoy said last. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.clock import Clock
from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.xds.resources.profile import EnvoyClass, Filter
from controlplane.xds.snapshot_cache import Snapshots
from controlplane.xds.stream import Refusal, Stream

MEMORY = 600.0  # seconds for which an Envoy is remembered after it disconnected


@dataclass(slots=True)
class _Member:
    latest: Stream  # the one that speaks for the Envoy: the youngest that is open, else the last that was
    connected_since: float
    open: list[Stream] = field(default_factory=list)  # oldest first
    left_at: float = 0.0
    last_nack: Nack | None = None
    nacks: int = 0
    problem: str = ""  # the latest that was told


class Fleet:
    """The Envoys by id. `on_event` is called with kind, subject (the id) and a sentence."""

    def __init__(self, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        self._clock = clock
        self._on_event = on_event
        self._members: dict[str, _Member] = {}

    def choose(self, wanted: Filter) -> None:
        """Hand a changed setting of the filter on to all streams."""
        for member in self._members.values():
            for stream in member.open:
                stream.choose(wanted)

    def classes(self) -> set[EnvoyClass]:
        """The classes of all Envoys that are connected."""
        return {stream.envoy_class for member in self._members.values() for stream in member.open}

    def join(self, stream: Stream) -> None:
        """A stream has begun."""
        name = stream.introduction.id
        member = self._members.setdefault(name, _Member(stream, self._clock()))
        if member.open:
            self._on_event(
                "envoy.duplicate",
                name,
                f"{stream.address} opened a stream as {name} while one from {member.latest.address} is open;"
                " if these are two Envoys, give each a node.id of its own",
            )
        else:
            member.connected_since = self._clock()
            version = stream.introduction.version or "of unknown version"
            message = f"Envoy {version} connected from {stream.address}"
            self._on_event("envoy.connected", name, message)
        member.open.append(stream)
        member.latest = stream

    def leave(self, stream: Stream) -> None:
        """A stream has ended."""
        name = stream.introduction.id
        member = self._members[name]
        member.open.remove(stream)
        if member.open:
            member.latest = member.open[-1]
        else:
            member.left_at = self._clock()
            self._on_event("envoy.disconnected", name, f"the stream from {stream.address} ended")

    def refused(self, stream: Stream, refusal: Refusal) -> None:
        """An Envoy has refused what it was sent."""
        name = stream.introduction.id
        nack = Nack(self._clock(), refusal.kind.url, refusal.version, refusal.message)
        member = self._members[name]
        member.last_nack = nack
        member.nacks += 1
        self._on_event(
            "envoy.nack",
            name,
            f"refused the {refusal.kind.noun} of version {refusal.version}: {refusal.message}",
        )
        if refusal.fell_back_to is not None:
            self._on_event(
                "envoy.filter_fallback",
                name,
                f"refused its first {refusal.kind.noun}, so it gets one with filter:"
                f" {refusal.fell_back_to.filter}",
            )

    def look(self, stream: Stream, snapshots: Snapshots) -> None:
        """Tell of a stream's problem when it is a new one."""
        member = self._members[stream.introduction.id]
        problem = stream.problem(snapshots)
        if stream is member.latest and problem != member.problem:
            member.problem = problem
            if problem:
                self._on_event("envoy.problem", stream.introduction.id, problem)

    def statuses(self, snapshots: Snapshots) -> list[EnvoyStatus]:
        """Every Envoy that is connected or was in the last ten minutes, by id."""
        now = self._clock()
        for name, member in list(self._members.items()):
            if not member.open and member.left_at < now - MEMORY:
                del self._members[name]
        return [_status(member, snapshots, now) for _, member in sorted(self._members.items())]


def _status(member: _Member, snapshots: Snapshots, now: float) -> EnvoyStatus:
    stream = member.latest
    return EnvoyStatus(
        id=stream.introduction.id,
        address=stream.address,
        version=stream.introduction.version,
        filter=stream.filter(snapshots),
        group=stream.introduction.group,
        zone=stream.introduction.zone,
        module_version=stream.introduction.build.module,
        problem=stream.problem(snapshots),
        connected_since=member.connected_since if member.open else None,
        # While it is open, keepalive answers for the Envoy.
        last_seen=now if member.open else member.left_at,
        acked_version=stream.acked_version(snapshots),
        published_version=stream.published_version(snapshots),
        endpoints_acked=stream.endpoints_acked(snapshots),
        streams=len(member.open),
        outdated=stream.outdated(snapshots),
        last_nack=member.last_nack,
        nacks=member.nacks,
        certificate_until=stream.certificate_until,
    )
