"""Settings in the bootstrap of each Envoy. An Envoy reads it only when it starts."""

from __future__ import annotations

from controlplane.config.tls import EnvoyFile
from controlplane.config.types import EnvoyListenAddress, SettingsSection, setting


class EnvoyOverloadSettings(SettingsSection):
    """Limits that protect an Envoy from overload.

    They are part of the Envoy's bootstrap: after a change, create a new one with `tidevoy bootstrap`, and
    restart the Envoy with it.
    """

    max_heap_bytes: int = setting(
        2_147_483_648, takes_effect="new envoys", unit="bytes", ge=67_108_864, le=1 << 50
    )
    """Heap size at which an Envoy stops accepting connections. At 95 %, it frees unused memory."""
    max_connections: int = setting(50_000, takes_effect="new envoys", ge=1, le=10_000_000)
    """Number of client connections over all ports at which an Envoy resets new ones."""


class EnvoyHealthTls(SettingsSection):
    """The files are on the Envoys' machines. An Envoy reads them when it starts."""

    cert: EnvoyFile = setting(..., takes_effect="new envoys")
    """Certificate (PEM, with its chain) that load balancers see."""
    key: EnvoyFile = setting(..., takes_effect="new envoys")
    """Private key (PEM) of that certificate."""


class EnvoyHealthSettings(SettingsSection):
    """HTTP port of an Envoy for load balancers: is it alive (`/healthz`), and ready for clients (`/readyz`)?

    It is part of the Envoy's bootstrap: after a change, create a new one with `tidevoy bootstrap`, and
    restart the Envoy with it.
    """

    listen: EnvoyListenAddress | None = setting(None, takes_effect="new envoys")
    """Address to listen on; default: no health port."""
    tls: EnvoyHealthTls | None = setting(None, takes_effect="new envoys")
    """TLS of the health port; default: no TLS."""
