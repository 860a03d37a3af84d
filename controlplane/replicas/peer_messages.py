"""Encodes and decodes the messages between replicas. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.model.facts import EnvoyLoad
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import ModuleReport
from controlplane.observe.clock_offset import ClockOffset
from controlplane.observe.envoy_reports.load_reports import parse_load_report
from controlplane.observe.envoy_reports.telemetry_pb2 import LoadReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.merged_fleet import ReplicaFleet

_SHARED_EVENT_PREFIXES = ("envoy.", "audit.")


class UnreadableMessage(Exception):
    """A peer sent a message that cannot be decoded."""


def is_shared_event(kind: str) -> bool:
    """Return whether other replicas need events of this kind; they observe all other kinds themselves."""
    return kind.startswith(_SHARED_EVENT_PREFIXES)


# --- encoding ---


def encode_load(envoy: str, at: float, report: bytes) -> bytes:
    """Encode a load report, unchanged."""
    return _serialize(peer_feed_pb2.News(at=at, load=peer_feed_pb2.Load(envoy=envoy, report=report)))


def encode_telemetry(number: int, envoy: str, at: float, message: bytes, *, first: bool) -> bytes:
    """Encode a message of a metrics stream, unchanged."""
    telemetry = peer_feed_pb2.Telemetry(stream=number, envoy=envoy, message=message, first=first)
    return _serialize(peer_feed_pb2.News(at=at, telemetry=telemetry))


def encode_telemetry_end(number: int, at: float) -> bytes:
    """Encode the end of a metrics stream."""
    return _serialize(peer_feed_pb2.News(at=at, telemetry_ended=number))


def encode_event(kind: str, subject: str, message: str, data: Mapping[str, Any], at: float) -> bytes:
    """Encode an event. Values in `data` that JSON lacks become strings."""
    event = peer_feed_pb2.Event(
        kind=kind, subject=subject, message=message, data=json.dumps(dict(data), default=str)
    )
    return _serialize(peer_feed_pb2.News(at=at, event=event))


def encode_fleet(fleet: ReplicaFleet, at: float) -> bytes:
    """Encode all Envoys of the sender."""
    encoded = peer_feed_pb2.Fleet(envoys=map(_encode_envoy, fleet.statuses))
    if fleet.stamp is not None:
        encoded.publishes = True
        encoded.term, encoded.serial = fleet.stamp
    return _serialize(peer_feed_pb2.News(at=at, fleet=encoded))


def _encode_envoy(status: EnvoyStatus) -> Any:
    nack = status.last_nack
    return peer_feed_pb2.Envoy(
        id=status.id,
        address=status.address,
        version=status.version,
        filter=status.filter,
        connected_since=status.connected_since,
        last_seen=status.last_seen,
        acked_version=status.acked_version,
        published_version=status.published_version,
        endpoints_acked=status.eds_acked,
        group=status.group,
        zone=status.zone,
        module_version=status.module_version,
        problem=status.problem,
        streams=status.streams,
        outdated=status.stale_resources,
        last_nack=peer_feed_pb2.Nack(
            at=nack.at, type_url=nack.type_url, version=nack.version, message=nack.message
        )
        if nack is not None
        else None,
        nacks=status.nacks,
        certificate_until=status.certificate_expires_at,
    )


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


# --- decoding ---


class PeerMessageReader:
    """Decodes the messages of one peer and passes on the facts in them, with times by our clock."""

    def __init__(
        self,
        *,
        on_load: Callable[[EnvoyLoad], None],
        on_report: Callable[[ModuleReport], None],
        on_fleet: Callable[[ReplicaFleet], None],
        on_event: Callable[[str, str, str, Mapping[str, Any]], None],
        new_stream: Callable[[str], TelemetryStream],
    ) -> None:
        """`new_stream` gets the Envoy's id if the start of a stream was missed, else an empty string."""
        self._on_load, self._on_report = on_load, on_report
        self._on_fleet, self._on_event = on_fleet, on_event
        self._new_stream = new_stream
        self._clock = ClockOffset()
        self._streams: dict[int, TelemetryStream] = {}
        self._connected_since: dict[str, tuple[float, float]] = {}  # per Envoy: by the peer's clock, by ours

    def receive(self, data: bytes, now: float) -> None:
        """Decode one message. Unknown kinds of later versions are ignored. Raises UnreadableMessage."""
        try:
            message = peer_feed_pb2.News.FromString(data)
            self._clock.observe(message.at, now)
            self._dispatch(message, self._clock.to_local(message.at))
        except (DecodeError, ValueError) as error:
            raise UnreadableMessage(str(error)) from error

    def _dispatch(self, message: Any, at: float) -> None:
        kind = message.WhichOneof("what")
        if kind == "load":
            report = LoadReport.FromString(message.load.report)
            self._on_load(parse_load_report(report, message.load.envoy, at, CLUSTER_NAME))
        elif kind == "telemetry":
            self._receive_telemetry(message.telemetry, at)
        elif kind == "telemetry_ended":
            self._streams.pop(message.telemetry_ended, None)
        elif kind == "fleet":
            self._receive_fleet(message.fleet)
        elif kind == "event":
            event = message.event
            event_data = json.loads(event.data or "{}")
            if not isinstance(event_data, dict):
                raise ValueError("the data of an event is not a JSON object")
            self._on_event(event.kind, event.subject, event.message, event_data)

    def _receive_telemetry(self, telemetry: Any, at: float) -> None:
        stream = self._streams.get(telemetry.stream)
        if stream is None:
            stream = self._streams[telemetry.stream] = self._new_stream(
                "" if telemetry.first else telemetry.envoy
            )
        report = stream.receive(telemetry.message, at)
        if report is not None:
            self._on_report(report)

    def _receive_fleet(self, fleet: Any) -> None:
        # Convert the time of a connection only once, although the estimate of the clock offset improves:
        # a different time means that the Envoy has reconnected.
        self._connected_since = {
            envoy.id: previous
            if (previous := self._connected_since.get(envoy.id)) is not None
            and previous[0] == envoy.connected_since
            else (envoy.connected_since, self._clock.to_local(envoy.connected_since))
            for envoy in fleet.envoys
            if envoy.HasField("connected_since")
        }
        stamp = (fleet.term, fleet.serial) if fleet.publishes else None
        self._on_fleet(ReplicaFleet(tuple(map(self._decode_status, fleet.envoys)), stamp))

    def _decode_status(self, envoy: Any) -> EnvoyStatus:
        nack = envoy.last_nack
        return EnvoyStatus(
            id=envoy.id,
            address=envoy.address,
            version=envoy.version,
            filter=envoy.filter,
            connected_since=self._connected_since[envoy.id][1] if envoy.HasField("connected_since") else None,
            last_seen=self._clock.to_local(envoy.last_seen),
            acked_version=envoy.acked_version,
            published_version=envoy.published_version,
            eds_acked=envoy.endpoints_acked,
            group=envoy.group,
            zone=envoy.zone,
            module_version=envoy.module_version,
            problem=envoy.problem,
            streams=envoy.streams,
            stale_resources=tuple(envoy.outdated),
            last_nack=Nack(self._clock.to_local(nack.at), nack.type_url, nack.version, nack.message)
            if envoy.HasField("last_nack")
            else None,
            nacks=envoy.nacks,
            certificate_expires_at=envoy.certificate_until if envoy.HasField("certificate_until") else None,
        )
