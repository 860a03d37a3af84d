"""Settings of the Envoys themselves. Those in their bootstrap take effect when an Envoy starts."""

from __future__ import annotations

from controlplane.config.tls import EnvoyFile
from controlplane.config.types import EnvoyListenAddress, SettingsSection, setting


class EnvoyEndSettings(SettingsSection):
    """How an Envoy with the module ends: by SIGTERM to its supervisor, and by `tidevoy envoys drain`.

    First it is not ready, then it accepts no new clients, and each session ends when it is idle and has no
    transaction.
    """

    wait: float = setting(0.0, unit="seconds", ge=0, le=3600)
    """Time for which the Envoy is not ready but still serves new clients. Choose more than load balancers
    need to notice."""
    timeout: float = setting(30.0, unit="seconds", ge=0, le=86_400)
    """Time after `wait` for sessions to end. Then the remaining ones are closed."""


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
