"""Encodes messages for other replicas; decodes theirs and passes the content on. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from google.protobuf.message import DecodeError

from controlplane.events.event_log import EventLog
from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.module_calls import InvalidModuleMessage, decode
from controlplane.observe.clock_offset import ClockOffset
from controlplane.observe.envoy_reports.load_reports import parse_load_report
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.envoy_reports.statement_reports import parse_report
from controlplane.observe.envoy_reports.statements_pb2 import ReportRequest
from controlplane.observe.envoy_reports.telemetry_pb2 import LoadReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.observe.fact_store import FactStore
from controlplane.observe.statements.collector import StatementCollector
from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.merged_fleet import ReplicaFleet


class UnreadableMessage(Exception):
    """A peer sent a message that cannot be decoded."""


def encode_message(at: float, **content: Any) -> bytes:
    """Encode a message. `at`: when this replica learned the content; `content`: one field of the oneof."""
    encoded: bytes = peer_feed_pb2.PeerMessage(at=at, **content).SerializeToString()
    return encoded


def encode_event(kind: str, subject: str, message: str, data: Mapping[str, Any], at: float) -> bytes:
    """Encode an event. Values in `data` of types that JSON does not have become strings.

    Lone surrogates, which a JSON request may contain, have no UTF-8 form: they become question marks.
    """
    json_data = json.dumps(dict(data), default=str)
    kind, subject, message = (text.encode(errors="replace").decode() for text in (kind, subject, message))
    event = peer_feed_pb2.Event(kind=kind, subject=subject, message=message, data=json_data)
    return encode_message(at, event=event)


def encode_fleet(fleet: ReplicaFleet, at: float) -> bytes:
    """Encode all Envoys of this replica, and the stamp of the plan that it publishes to them."""
    encoded = peer_feed_pb2.Fleet(envoys=[peer_feed_pb2.Envoy(**asdict(status)) for status in fleet.statuses])
    if fleet.published_stamp is not None:
        encoded.publishes = True
        encoded.term, encoded.serial = fleet.published_stamp
    return encode_message(at, fleet=encoded)


class PeerMessageReader:
    """Decodes the messages of one peer and passes their content on, with times by our clock."""

    def __init__(
        self,
        facts: FactStore,
        events: EventLog,
        module_metrics: MetricsService,
        statements: StatementCollector,
        on_fleet: Callable[[ReplicaFleet], None],
    ) -> None:
        """`facts`, `events` and `statements` get the peer's reports and events; `on_fleet` gets its Envoys.

        `module_metrics` parses the reports of Envoys' modules.
        """
        self._facts = facts
        self._events = events
        self._module_metrics = module_metrics
        self._statements = statements
        self._on_fleet = on_fleet
        self._clock = ClockOffset()
        self._streams: dict[int, TelemetryStream] = {}
        self._connected_since: dict[str, tuple[float, float]] = {}  # Envoy -> by the peer's clock, by ours

    def receive(self, data: bytes, now: float) -> None:
        """Decode one message; ignore a kind that only newer versions know. Raises UnreadableMessage."""
        try:
            message = peer_feed_pb2.PeerMessage.FromString(data)
            self._clock.observe(message.at, now)
            self._dispatch(message, self._clock.to_local(message.at))
        except (DecodeError, ValueError) as error:
            raise UnreadableMessage(str(error)) from error

    def _dispatch(self, message: Any, at: float) -> None:
        match message.WhichOneof("content"):
            case "load_report":
                report = LoadReport.FromString(message.load_report.report)
                load = parse_load_report(report, message.load_report.envoy, at)
                self._facts.put_load(load)
            case "telemetry":
                self._receive_telemetry(message.telemetry, at)
            case "telemetry_ended":
                self._streams.pop(message.telemetry_ended, None)
            case "statements":
                # A report of a later version is left out: no decision needs statements.
                with suppress(InvalidModuleMessage):
                    report = decode(ReportRequest, message.statements.report)
                    self._statements.put(parse_report(report, message.statements.envoy))
            case "fleet":
                self._receive_fleet(message.fleet)
            case "event":
                event = message.event
                event_data = json.loads(event.data or "{}")
                if not isinstance(event_data, dict):
                    raise ValueError("the data of an event is not a JSON object")
                self._events.record_unforwarded(event.kind, event.subject, event.message, event_data)

    def _receive_telemetry(self, telemetry: Any, at: float) -> None:
        stream = self._streams.get(telemetry.stream)
        if stream is None:
            resumed_envoy = "" if telemetry.first else telemetry.envoy
            stream = self._streams[telemetry.stream] = self._module_metrics.new_stream(resumed_envoy)
        report = stream.receive(telemetry.message, at)
        if report is not None:
            self._facts.put_module_report(report, is_already_reported=True)

    def _receive_fleet(self, fleet: Any) -> None:
        # Convert the start of a connection to our clock only once. The estimated clock offset changes, and a
        # different start would look like a reconnect.
        before = self._connected_since
        self._connected_since = {
            envoy.id: known
            if (known := before.get(envoy.id)) is not None and known[0] == envoy.connected_since
            else (envoy.connected_since, self._clock.to_local(envoy.connected_since))
            for envoy in fleet.envoys
            if envoy.HasField("connected_since")
        }
        stamp = (fleet.term, fleet.serial) if fleet.publishes else None
        self._on_fleet(ReplicaFleet(tuple(map(self._decode_status, fleet.envoys)), stamp))

    def _decode_status(self, envoy: Any) -> EnvoyStatus:
        # Optional fields (in protobuf's terms: fields with presence) that are not set become None.
        values: dict[str, Any] = {
            field.name: getattr(envoy, field.name)
            if not field.has_presence or envoy.HasField(field.name)
            else None
            for field in envoy.DESCRIPTOR.fields
        }
        values["last_seen"] = self._clock.to_local(envoy.last_seen)
        values["stale_resources"] = tuple(envoy.stale_resources)
        values["stale_settings"] = tuple(envoy.stale_settings)
        if values["connected_since"] is not None:
            values["connected_since"] = self._connected_since[envoy.id][1]
        if (nack := values["last_nack"]) is not None:
            at = self._clock.to_local(nack.at)
            values["last_nack"] = Nack(at, nack.type_url, nack.version, nack.message)
        return EnvoyStatus(**values)
