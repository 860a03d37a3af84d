"""Render an Envoy's bootstrap configuration from a template and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, StrictUndefined

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.version import VERSION
from controlplane.xds.resources.profile import (
    FEATURES_METADATA_KEY,
    GROUP_METADATA_KEY,
    MODULE_FEATURES,
    MODULE_METADATA_KEY,
)

_TEMPLATE = "bootstrap.yaml.j2"
_MIN_FLUSH_SECONDS = 1.0  # the module updates its counts once a second
# Name prefixes of the module's counters that balancing does not need.
_OPTIONAL_STAT_PREFIXES = tuple(
    f"tidevoy.{prefix}"
    for prefix in ("bytes", "command", "errors", "logins", "login_failures", "connect_failures", "migration_")
)


@dataclass(frozen=True, slots=True)
class ControlPlaneTls:
    """How an Envoy verifies control planes and authenticates to them; paths are on the Envoy's machine.

    `server_name` is a DNS name or IP address that each control plane's certificate must contain. If it is
    None, each certificate must contain the host of any of the control planes.
    """

    ca: str
    server_name: str | None = None
    cert: str | None = None
    key: str | None = None

    def server_names(self, control_planes: Sequence[str]) -> list[dict[str, str]]:
        """Return names with Envoy's `san_type`; a certificate must contain at least one of them."""
        hosts = (addresses.split(control_plane)[0] for control_plane in control_planes)
        names = dict.fromkeys(hosts if self.server_name is None else [self.server_name])
        return [
            {"name": name, "san_type": "DNS" if addresses.literal_ip(name) is None else "IP_ADDRESS"}
            for name in names
        ]


def render_bootstrap(
    settings: Settings,
    *,
    control_planes: Sequence[str],
    node_id: str | None,
    admin: str = "127.0.0.1:9901",
    tls: ControlPlaneTls | None = None,
    module: str | None = None,
    delta: bool = False,
    group: str = "",
    zone: str = "",
    health: str | None = None,
) -> str:
    """Return a bootstrap as YAML. Raises ValueError if an address is invalid or `module` is relative.

    `control_planes` and `admin` are `host:port`; the admin port may be 0. Without `node_id`, Envoy must be
    started with `--service-node`. `module` is the path of Tidevoy's module on the Envoy's machine. `delta`
    selects the incremental variant of xDS. `group` is the only group that the Envoy serves, or empty if it
    serves all. `zone` is the Envoy's location, or empty if it is unknown. `health` is the address for load
    balancers' probes if it differs from `envoy_health.listen`.
    """
    if not control_planes:
        raise ValueError("an Envoy needs the address of at least one control plane")
    if module is not None and not PurePosixPath(module).is_absolute():
        raise ValueError(f"{module} is a relative path; give the absolute path on the Envoy's machine")
    health_address = health or settings.envoy_health.listen
    socket_addresses = [_socket_address(address) for address in control_planes]
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)  # noqa: S701 - YAML; each value goes through tojson
    return environment.from_string(_read_template()).render(
        node_id=node_id,
        admin=_socket_address(admin),
        control_planes=socket_addresses,
        all_are_ip_addresses=all(addresses.literal_ip(plane["address"]) for plane in socket_addresses),
        delta=delta,
        tls=tls,
        server_names=tls.server_names(control_planes) if tls is not None else [],
        module=module,
        version=VERSION,
        metadata=_metadata(module, group),
        zone=zone,
        flush_interval=f"{max(_MIN_FLUSH_SECONDS, settings.balance.report_interval):g}s",
        excluded_stat_prefixes=_OPTIONAL_STAT_PREFIXES
        if settings.balance.module_counts == "sessions"
        else (),
        overload=settings.overload,
        health_address=_socket_address(health_address) if health_address else None,
        health_tls=settings.envoy_health.tls,
    )


def _metadata(module: str | None, group: str) -> dict[str, str]:
    values = {
        MODULE_METADATA_KEY: VERSION if module else "",
        FEATURES_METADATA_KEY: " ".join(MODULE_FEATURES) if module else "",
        GROUP_METADATA_KEY: group,
    }
    return {key: value for key, value in values.items() if value}


def _socket_address(address: str) -> dict[str, Any]:
    # `addresses.split` rejects port 0, which is valid here: the kernel then chooses the port.
    host_text, colon, port = address.rpartition(":")
    host, number = addresses.split(f"{host_text}:1" if colon and port == "0" else address)
    return {"address": host, "port_value": 0 if port == "0" else number}


def _read_template() -> str:
    packaged = files("controlplane.xds.bootstrap").joinpath(_TEMPLATE)
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    checkout = Path(__file__).parents[3] / "envoy" / _TEMPLATE
    return checkout.read_text(encoding="utf-8")
