"""What one replica tells another, put into bytes and read again. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.model.facts import EnvoyLoad
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import ModuleReport
from controlplane.observe.clock_offset import PeerClock
from controlplane.observe.envoy_reports.load_reports import load
from controlplane.observe.envoy_reports.telemetry_pb2 import LoadReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.merged_fleet import ReplicaFleet

_SHARED = ("envoy.", "audit.")


class Unreadable(Exception):
    """A peer told something that cannot be read."""


def is_shared(kind: str) -> bool:
    """Whether events of that kind are told to other replicas; they find all others out for themselves."""
    return kind.startswith(_SHARED)


# --- telling ---


def of_load(envoy: str, at: float, report: bytes) -> bytes:
    """A load report as it came."""
    return _bytes(peer_feed_pb2.News(at=at, load=peer_feed_pb2.Load(envoy=envoy, report=report)))


def of_telemetry(number: int, envoy: str, at: float, message: bytes, *, first: bool) -> bytes:
    """A message of a metrics stream as it came."""
    told = peer_feed_pb2.Telemetry(stream=number, envoy=envoy, message=message, first=first)
    return _bytes(peer_feed_pb2.News(at=at, telemetry=told))


def of_telemetry_end(number: int, at: float) -> bytes:
    """The end of a metrics stream."""
    return _bytes(peer_feed_pb2.News(at=at, telemetry_ended=number))


def of_event(kind: str, subject: str, message: str, data: Mapping[str, Any], at: float) -> bytes:
    """An event. What JSON has not in `data` becomes a text."""
    told = peer_feed_pb2.Event(
        kind=kind, subject=subject, message=message, data=json.dumps(dict(data), default=str)
    )
    return _bytes(peer_feed_pb2.News(at=at, event=told))


def of_fleet(fleet: ReplicaFleet, at: float) -> bytes:
    """All Envoys of the teller."""
    told = peer_feed_pb2.Fleet(envoys=map(_envoy, fleet.statuses))
    if fleet.stamp is not None:
        told.publishes = True
        told.term, told.serial = fleet.stamp
    return _bytes(peer_feed_pb2.News(at=at, fleet=told))


def _envoy(status: EnvoyStatus) -> Any:
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
        endpoints_acked=status.endpoints_acked,
        group=status.group,
        zone=status.zone,
        module_version=status.module_version,
        problem=status.problem,
        streams=status.streams,
        outdated=status.outdated,
        last_nack=peer_feed_pb2.Nack(
            at=nack.at, type_url=nack.type_url, version=nack.version, message=nack.message
        )
        if nack is not None
        else None,
        nacks=status.nacks,
        certificate_until=status.certificate_until,
    )


def _bytes(message: Any) -> bytes:
    serialised: bytes = message.SerializeToString()
    return serialised


# --- hearing ---


class Hearing:
    """Takes in what one peer tells from when we began to follow it, and hands on the facts in it.

    All times are converted to our clock.
    """

    def __init__(
        self,
        *,
        on_load: Callable[[EnvoyLoad], None],
        on_report: Callable[[ModuleReport], None],
        on_fleet: Callable[[ReplicaFleet], None],
        on_event: Callable[[str, str, str, Mapping[str, Any]], None],
        new_stream: Callable[[str], TelemetryStream],
    ) -> None:
        """`new_stream` gets the Envoy's id when the beginning of a stream was missed, else an empty text."""
        self._on_load, self._on_report = on_load, on_report
        self._on_fleet, self._on_event = on_fleet, on_event
        self._new_stream = new_stream
        self._clock = PeerClock()
        self._streams: dict[int, TelemetryStream] = {}
        self._connected: dict[str, tuple[float, float]] = {}  # by Envoy: since when, there and here

    def take(self, data: bytes, now: float) -> None:
        """One piece of news. Unreadable. What a later version tells beyond that is passed over."""
        try:
            news = peer_feed_pb2.News.FromString(data)
            self._clock.hear(news.at, now)
            self._take(news, self._clock.here(news.at))
        except (DecodeError, ValueError) as error:
            raise Unreadable(str(error)) from error

    def _take(self, news: Any, at: float) -> None:
        what = news.WhichOneof("what")
        if what == "load":
            report = LoadReport.FromString(news.load.report)
            self._on_load(load(report, news.load.envoy, at, CLUSTER_NAME))
        elif what == "telemetry":
            self._take_telemetry(news.telemetry, at)
        elif what == "telemetry_ended":
            self._streams.pop(news.telemetry_ended, None)
        elif what == "fleet":
            self._take_fleet(news.fleet)
        elif what == "event":
            event = news.event
            more = json.loads(event.data or "{}")
            if not isinstance(more, dict):
                raise ValueError("the data of an event is no JSON object")
            self._on_event(event.kind, event.subject, event.message, more)

    def _take_telemetry(self, told: Any, at: float) -> None:
        stream = self._streams.get(told.stream)
        if stream is None:
            stream = self._streams[told.stream] = self._new_stream("" if told.first else told.envoy)
        report = stream.feed(told.message, at)
        if report is not None:
            self._on_report(report)

    def _take_fleet(self, told: Any) -> None:
        # Of an Envoy that stays connected it is one and the same time for ever, although the clocks' distance
        # is known ever better: by that time it is told whether there was another connection meanwhile.
        self._connected = {
            envoy.id: known
            if (known := self._connected.get(envoy.id)) is not None and known[0] == envoy.connected_since
            else (envoy.connected_since, self._clock.here(envoy.connected_since))
            for envoy in told.envoys
            if envoy.HasField("connected_since")
        }
        stamp = (told.term, told.serial) if told.publishes else None
        self._on_fleet(ReplicaFleet(tuple(map(self._status, told.envoys)), stamp))

    def _status(self, told: Any) -> EnvoyStatus:
        nack = told.last_nack
        return EnvoyStatus(
            id=told.id,
            address=told.address,
            version=told.version,
            filter=told.filter,
            connected_since=self._connected[told.id][1] if told.HasField("connected_since") else None,
            last_seen=self._clock.here(told.last_seen),
            acked_version=told.acked_version,
            published_version=told.published_version,
            endpoints_acked=told.endpoints_acked,
            group=told.group,
            zone=told.zone,
            module_version=told.module_version,
            problem=told.problem,
            streams=told.streams,
            outdated=tuple(told.outdated),
            last_nack=Nack(self._clock.here(nack.at), nack.type_url, nack.version, nack.message)
            if told.HasField("last_nack")
            else None,
            nacks=told.nacks,
            certificate_until=told.certificate_until if told.HasField("certificate_until") else None,
        )
