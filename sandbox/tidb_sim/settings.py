"""The settings of one simulated server: values only, checked when parsed (`command.py`) or built (tests)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.config.settings import ClientTls
from sandbox.tidb_sim.node import DEFAULT_RELEASE
from sandbox.tidb_sim.session import SessionRules


@dataclass(frozen=True)
class SimSettings:
    """One simulated server. Ports: 0 = any free one. Times are in seconds.

    `pd` are URLs; without any the server does not register. `cluster_tls` also makes client certificates
    mandatory, as `security.cluster-ssl-ca` does in TiDB.
    """

    rules: SessionRules
    host: str = "127.0.0.1"
    port: int = 0
    status_host: str = "127.0.0.1"
    status_port: int = 0
    advertise_address: str = "127.0.0.1"
    pd: tuple[str, ...] = ()
    cluster_tls: ClientTls | None = None
    """Cluster TLS: our certificate towards PD, and on the status port."""
    release: str = DEFAULT_RELEASE
    server_version: str = ""
    """The version in the greeting; empty: derived from the release as in TiDB."""
    labels: Mapping[str, str] = field(default_factory=dict)
    signing_cert: str = ""
    """`security.session-token-signing-cert`, as `/config` shows it."""
    signing_key: str = ""
    """`security.session-token-signing-key`; without both no session token is signed."""
    graceful_wait: float = 0.0
    """`graceful-wait-before-shutdown`."""
    drain_timeout: float = 15.0
    """How long a shutdown waits for transactions; fixed in TiDB."""
    topology_ttl: int = 45
    """Lease of the registration: how long it lasts without a refresh."""
    topology_refresh: float = 30.0
    """How often the registration is written."""

    @property
    def version(self) -> str:
        """The MySQL-style version."""
        return self.server_version or f"8.0.11-TiDB-{self.release}"
