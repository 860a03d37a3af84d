"""Connections that carry SQL: from clients to the Envoys, and from the Envoys to TiDB."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from controlplane.config.types import (
    EnvoyListenAddress,
    SettingsSection,
    ValueFormat,
    setting,
    validate_envoy_path,
)

AccessLog = Annotated[
    Path,
    AfterValidator(validate_envoy_path),
    ValueFormat(
        "an absolute path on the Envoys' machines, such as /var/log/tidevoy/sessions.log or /dev/stdout"
    ),
]


class SqlSettings(SettingsSection):
    """The port that SQL clients connect to, on every Envoy."""

    listen: EnvoyListenAddress = setting(
        "0.0.0.0:6000", "Address on which each Envoy listens for SQL clients.", "new envoys"
    )
    max_connections: int = setting(
        0,
        "Most client connections of one Envoy; 0: no limit of ours. Over it the module answers error 1040; an"
        " Envoy without it closes.",
        "new envoys",
        ge=0,
        le=10_000_000,
    )
    login_timeout: float = setting(
        # Below the `connect_timeout` of MariaDB and MySQL (10 s), which close without an error.
        8.0,
        "Seconds a client has to log in (module only). If a node closes earlier because the client is silent,"
        " the client gets the same error.",
        "now",
        unit="seconds",
        gt=0,
        le=3600,
    )
    idle_timeout: float = setting(
        0.0,
        "Seconds without traffic after which a session is closed; 0: never. With the module, a session that"
        " waits for an answer is not idle, and a change applies to new sessions. Envoys without the module"
        " apply a change when they start.",
        "now",
        unit="seconds",
        ge=0,
        le=31_536_000,
    )
    keepalive_idle: int = setting(
        60,
        "Seconds of silence before TCP keepalive probes a client.",
        "new envoys",
        unit="seconds",
        ge=1,
        le=32767,
    )
    keepalive_interval: int = setting(
        10, "Seconds between two such probes.", "new envoys", unit="seconds", ge=1, le=32767
    )
    keepalive_probes: int = setting(
        3, "Unanswered probes after which the connection counts as dead.", "new envoys", ge=1, le=127
    )
    proxy_protocol: Literal["off", "optional", "required"] = setting(
        "off", "PROXY protocol from clients (v1 and v2); `optional` trusts whoever sends one.", "new envoys"
    )
    compression: Literal["off", "passthrough"] = setting(
        "off",
        "Compression of the MySQL protocol (module only): `off` does not offer it, and refuses clients that"
        " use it anyway; `passthrough` leaves it to client and node, and compressed sessions are not"
        " followed.",
        "new envoys",
    )
    access_log: AccessLog | None = setting(
        None,
        "File to which each Envoy writes a line of JSON for each session, when it has ended; default: none.",
        "new envoys",
    )


class BackendSettings(SettingsSection):
    """Connections from Envoys to TiDB."""

    connect_timeout: float = setting(
        1.0,
        "Seconds an Envoy waits for a TCP connection to a node; with the module, for its greeting too.",
        "new envoys",
        unit="seconds",
        gt=0,
        le=60,
    )
    max_connect_attempts: int = setting(
        3,
        "Nodes an Envoy tries for one client before it gives up; with the module, full nodes (error 1040) do"
        " not count.",
        "new envoys",
        ge=1,
        le=20,
    )
    max_connections: int = setting(
        0,
        "Most connections of one Envoy to all nodes; 0: no limit of ours.",
        "new envoys",
        ge=0,
        le=10_000_000,
    )
    eject_seconds: float = setting(
        5.0,
        "Seconds for which an Envoy ejects a node after a failed attempt to use it.",
        "new envoys",
        unit="seconds",
        gt=0,
        le=300,
    )
    sentinels: bool = setting(
        True,
        "Whether each Envoy with the module keeps an idle connection to each node, to detect within 4 s that"
        " the node cannot be reached any more.",
        "new envoys",
    )
    keepalive_idle: int = setting(
        60,
        "Seconds of silence before TCP keepalive probes a node.",
        "new envoys",
        unit="seconds",
        ge=1,
        le=32767,
    )
    keepalive_interval: int = setting(
        3, "Seconds between two such probes.", "new envoys", unit="seconds", ge=1, le=32767
    )
    keepalive_probes: int = setting(
        5, "Unanswered probes after which the connection counts as dead.", "new envoys", ge=1, le=127
    )
    proxy_protocol: Literal["off", "v1", "v2"] = setting(
        "off", "PROXY protocol to TiDB (its `proxy-protocol.networks` must name the Envoys).", "new envoys"
    )
