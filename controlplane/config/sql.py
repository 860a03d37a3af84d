"""Settings of SQL connections: from clients to the Envoys, and from the Envoys to TiDB."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from controlplane.config.types import (
    Cidr,
    EnvoyListenAddress,
    SettingError,
    SettingsSection,
    ValueFormat,
    section,
    setting,
    validate_envoy_path,
)

EnvoyLogFile = Annotated[
    Path,
    AfterValidator(validate_envoy_path),
    ValueFormat(
        "an absolute path on the Envoys' machines, such as /var/log/tidevoy/sessions.log or /dev/stdout"
    ),
]


class LoginLimits(SettingsSection):
    """Limits of one Envoy with the module for clients that have not finished their login; 0: unlimited.

    Over a limit, clients get error 1040. The address of a client is that in the PROXY header of a trusted
    proxy. IPv6 addresses of one /64 network count as one address.
    """

    max_logins: int = setting(50_000, ge=0, le=10_000_000)
    """Maximum number of unfinished logins."""
    max_logins_per_address: int = setting(10_000, ge=0, le=10_000_000)
    """Maximum number of unfinished logins of one client address."""
    max_bytes: int = setting(64 << 20, unit="bytes", ge=0, le=64 << 30)
    """Memory limit for incomplete packets of unfinished logins."""
    max_bytes_per_address: int = setting(16 << 20, unit="bytes", ge=0, le=64 << 30)
    """Memory limit for incomplete packets of unfinished logins of one client address."""
    max_decryptions_per_second: float = setting(1_000.0, ge=0, le=100_000)
    """Maximum rate of RSA operations for passwords of clients without TLS (see `tls.client.rsa_key`). As many
    as in 10 seconds may come at once."""
    max_decryptions_per_second_per_address: float = setting(200.0, ge=0, le=100_000)
    """Maximum rate of these RSA operations for one client address."""
    shared_addresses: tuple[Cidr, ...] = setting(())
    """Networks of addresses that many clients share, such as of NAT gateways and of balancers that send no
    PROXY header. The limits per address do not apply to them."""


class EnvoyLogSettings(SettingsSection):
    """A log that each Envoy writes (module only)."""

    path: EnvoyLogFile | None = setting(None)
    """File to which each Envoy writes the log; default: no log."""
    max_bytes: int = setting(100 << 20, unit="bytes", ge=0, le=1 << 40)
    """Size at which the module rotates the file; 0: never. Standard output is not rotated."""
    keep: int = setting(5, ge=0, le=100)
    """Number of rotated files that are kept; their names end in `.1`, `.2` and so on."""


class LoginLogSettings(EnvoyLogSettings):
    """A log with one line of JSON for each login and each change of user (module only)."""


class SqlSettings(SettingsSection):
    """The port that SQL clients connect to, on every Envoy."""

    listen: EnvoyListenAddress = setting("0.0.0.0:6000", takes_effect="new envoys")
    """Address on which each Envoy listens for SQL clients."""
    max_connections: int = setting(0, takes_effect="now with the module", ge=0, le=10_000_000)
    """Maximum number of client connections of one Envoy; 0: unlimited. Over the limit, clients get error
    1040; an Envoy without the module closes the connection."""
    # Below the default `connect_timeout` (10 s) of MariaDB and MySQL servers: they end a late login without
    # an error.
    login_timeout: float = setting(8.0, unit="seconds", gt=0, le=3600)
    """Timeout of a client's login, after which the client gets error 1159 (module only). It also gets this
    error if the node closes the connection earlier because the client is silent."""
    wait_for_node: float = setting(5.0, unit="seconds", ge=0, le=60)
    """Time for which a new client waits while no node of any group is in service, or all nodes refuse
    connections (module only); 0: it gets error 1105 at once. Clients have timeouts of their own."""
    max_waiting_logins: int = setting(10_000, ge=0, le=10_000_000)
    """Maximum number of clients of one Envoy that wait for a node; others get error 1105 at once."""
    login_limits: LoginLimits = section(LoginLimits, "Limits of clients that have not finished their login.")
    idle_timeout: float = setting(
        0.0, takes_effect="now with the module", unit="seconds", ge=0, le=31_536_000
    )
    """Seconds without traffic after which a session is closed; 0: never. With the module, a session that
    waits for a response is not idle, and a change applies to new sessions."""
    keepalive_idle: int = setting(60, takes_effect="now with the module", unit="seconds", ge=1, le=32767)
    """Seconds of silence before TCP keepalive probes a client."""
    keepalive_interval: int = setting(10, takes_effect="now with the module", unit="seconds", ge=1, le=32767)
    """Seconds between two TCP keepalive probes."""
    keepalive_probes: int = setting(3, takes_effect="now with the module", ge=1, le=127)
    """Number of unanswered TCP keepalive probes after which a connection counts as dead."""
    proxy_protocol: Literal["off", "optional", "required"] = setting(
        "off", takes_effect="now with the module"
    )
    """PROXY protocol (v1 and v2) from clients. Unless this is `off`, connections from `trusted_proxies` must
    begin with a header. Connections from other addresses are closed if this is `required`, and must have no
    header if it is `optional` (module only)."""
    trusted_proxies: tuple[Cidr, ...] = setting((), takes_effect="now with the module")
    """Networks of the proxies whose PROXY headers name the client's address."""
    compression: Literal["off", "passthrough"] = setting("off")
    """Compression of the MySQL protocol (module only). off: Envoys do not offer it, and reject clients that
    use it anyway. passthrough: client and node negotiate it; compressed sessions are not tracked, so they do
    not migrate."""
    access_log: EnvoyLogFile | None = setting(None, takes_effect="new envoys")
    """File to which each Envoy writes one line of JSON when a session ends; default: no access log."""
    login_log: LoginLogSettings = section(LoginLogSettings, "Log of logins and changes of user.")

    @model_validator(mode="after")
    def _check_trusted_proxies(self) -> SqlSettings:
        if self.proxy_protocol != "off" and not self.trusted_proxies:
            raise SettingError(
                f"is {self.proxy_protocol}, but sql.trusted_proxies is empty",
                "list the networks of your proxies there, such as 10.0.0.0/24",
                key="proxy_protocol",
            )
        return self


class BackendSettings(SettingsSection):
    """Connections from Envoys to TiDB."""

    connect_timeout: float = setting(1.0, takes_effect="now with the module", unit="seconds", gt=0, le=60)
    """Timeout of a TCP connection to a node; with the module, it includes the node's greeting."""
    max_connect_attempts: int = setting(3, takes_effect="now with the module", ge=1, le=20)
    """Number of nodes that an Envoy tries for one client before it gives up. With the module, nodes that
    return error 1040 (too many connections) do not count, and if all nodes refuse connections, the client
    goes on for `sql.wait_for_node`."""
    max_connections: int = setting(0, takes_effect="now with the module", ge=0, le=10_000_000)
    """Maximum number of connections of one Envoy to all nodes; 0: unlimited."""
    ejection_time: float = setting(5.0, takes_effect="now with the module", unit="seconds", gt=0, le=300)
    """Seconds for which an Envoy ejects a node after a failed attempt to use it."""
    health_connections: bool = setting(True)
    """Whether each Envoy with the module keeps an idle connection to each node, to detect within 4 s that the
    node has become unreachable."""
    keepalive_idle: int = setting(60, takes_effect="now with the module", unit="seconds", ge=1, le=32767)
    """Seconds of silence before TCP keepalive probes a node."""
    keepalive_interval: int = setting(3, takes_effect="now with the module", unit="seconds", ge=1, le=32767)
    """Seconds between two TCP keepalive probes."""
    keepalive_probes: int = setting(5, takes_effect="now with the module", ge=1, le=127)
    """Number of unanswered TCP keepalive probes after which a connection counts as dead."""
    proxy_protocol: Literal["off", "v1", "v2"] = setting("off", takes_effect="now with the module")
    """PROXY protocol to TiDB (its `proxy-protocol.networks` must include the Envoys)."""
