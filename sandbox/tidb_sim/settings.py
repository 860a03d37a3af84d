"""The settings of one simulated server. `command.py` parses and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.config.own_tls import ClientTls
from sandbox.tidb_sim.node import DEFAULT_RELEASE
from sandbox.tidb_sim.session import SessionRules


@dataclass(frozen=True)
class SimSettings:
    """The settings of one simulated server. Port 0: any free port. Times are in seconds.

    `pd`: URLs; if empty, the server does not register. `cluster_tls`: TLS of the status port; with a CA, it
    requires client certificates, as with `security.cluster-ssl-ca` in TiDB.
    """

    rules: SessionRules
    host: str = "127.0.0.1"
    port: int = 0
    status_host: str = "127.0.0.1"
    status_port: int = 0
    advertise_address: str = "127.0.0.1"
    pd: tuple[str, ...] = ()
    cluster_tls: ClientTls | None = None
    release: str = DEFAULT_RELEASE
    labels: Mapping[str, str] = field(default_factory=dict)
    signing_cert: str = ""  # `security.session-token-signing-cert`, as `/config` shows it.
    signing_key: str = ""  # `security.session-token-signing-key`, as `/config` shows it.
    graceful_wait: float = 0.0  # `graceful-wait-before-shutdown`.
    drain_timeout: float = 15.0  # How long a shutdown waits for transactions; fixed in TiDB.
    topology_ttl: int = 45  # How long the registration's lease lasts without a renewal.
    topology_refresh: float = 30.0  # How often the registration is written.

    @property
    def version(self) -> str:
        """The MySQL-style version, as in the greeting."""
        return f"8.0.11-TiDB-{self.release}"
