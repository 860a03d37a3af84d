"""Settings of SQL connections: from clients to the Envoys, and from the Envoys to TiDB."""

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
        "Maximum number of client connections of one Envoy; 0: unlimited. Over the limit, clients get error"
        " 1040; an Envoy without the module closes the connection.",
        "new envoys",
        ge=0,
        le=10_000_000,
    )
    login_timeout: float = setting(
        # Below the `connect_timeout` of MariaDB and MySQL (10 s), after which they close without an error.
        8.0,
        "Timeout of a client's login (module only). If a node closes earlier because the client is silent,"
        " the client gets the same error.",
        "now",
        unit="seconds",
        gt=0,
        le=3600,
    )
    idle_timeout: float = setting(
        0.0,
        "Seconds without traffic after which a session is closed; 0: never. With the module, a session that"
        " waits for a response is not idle, and a change applies to new sessions. Envoys without the module"
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
        10, "Seconds between two TCP keepalive probes.", "new envoys", unit="seconds", ge=1, le=32767
    )
    keepalive_probes: int = setting(
        3,
        "Number of unanswered TCP keepalive probes after which a connection counts as dead.",
        "new envoys",
        ge=1,
        le=127,
    )
    proxy_protocol: Literal["off", "optional", "required"] = setting(
        "off",
        "PROXY protocol from clients (v1 and v2); `optional` trusts every client that sends a header.",
        "new envoys",
    )
    compression: Literal["off", "passthrough"] = setting(
        "off",
        "Compression of the MySQL protocol (module only): `off` does not offer it, and rejects clients that"
        " use it anyway; `passthrough` leaves it to client and node, and the module does not track"
        " compressed sessions, so they do not migrate.",
        "new envoys",
    )
    access_log: AccessLog | None = setting(
        None,
        "File to which each Envoy writes one line of JSON when a session ends; default: no access log.",
        "new envoys",
    )


class BackendSettings(SettingsSection):
    """Connections from Envoys to TiDB."""

    connect_timeout: float = setting(
        1.0,
        "Timeout of a TCP connection to a node; with the module, it includes the node's greeting.",
        "new envoys",
        unit="seconds",
        gt=0,
        le=60,
    )
    max_connect_attempts: int = setting(
        3,
        "Number of nodes that an Envoy tries for one client before it gives up; with the module, nodes that"
        " return error 1040 (too many connections) do not count.",
        "new envoys",
        ge=1,
        le=20,
    )
    max_connections: int = setting(
        0,
        "Maximum number of connections of one Envoy to all nodes; 0: unlimited.",
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
        " the node has become unreachable.",
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
        3, "Seconds between two TCP keepalive probes.", "new envoys", unit="seconds", ge=1, le=32767
    )
    keepalive_probes: int = setting(
        5,
        "Number of unanswered TCP keepalive probes after which a connection counts as dead.",
        "new envoys",
        ge=1,
        le=127,
    )
    proxy_protocol: Literal["off", "v1", "v2"] = setting(
        "off", "PROXY protocol to TiDB (its `proxy-protocol.networks` must include the Envoys).", "new envoys"
    )
