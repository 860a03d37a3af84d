"""All settings with meaning, unit, default, and when a change takes effect; no I/O here.

These models are filled from a YAML file and environment variables (`TIDEVOY_` + path, `__` between levels),
read by `controlplane.config.loader`. Unknown keys are rejected; a key without a value means its default.
`docs/reference/configuration.md` is generated from this package. A change takes effect:

* `now`: a reload (SIGHUP, or `POST /v1/config/reload`) applies it;
* `new envoys`: an Envoy gets it once, and keeps the old value until that Envoy is restarted;
* `restart`: the control plane has to be restarted.
"""

from __future__ import annotations

import ipaddress
import itertools
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from controlplane.config.api import ApiSettings
from controlplane.config.balance import BalanceSettings
from controlplane.config.groups import BackupSettings, GroupSettings, ZoneSettings
from controlplane.config.migration import MigrationSettings, RebalanceSettings
from controlplane.config.replicas import ReplicaSettings
from controlplane.config.rollouts import RolloutSettings
from controlplane.config.sql import BackendSettings, SqlSettings
from controlplane.config.tls import SqlTlsSettings
from controlplane.config.types import (
    Address,
    Directory,
    File,
    ListenAddressAnyPort,
    PdUrl,
    SettingError,
    SettingsSection,
    literal_host,
    required,
    section,
    setting,
)
from controlplane.model.nodes import NodeGroup as Selected
from controlplane.model.plan import BalancePolicy, Policy


class ClientTls(SettingsSection):
    """The client certificate and its key must be set together."""

    ca: File | None = setting(
        None, "CA bundle (PEM) that the server's certificate must chain to; default: the system's.", "restart"
    )
    cert: File | None = setting(None, "Tidevoy's client certificate (PEM), for mutual TLS.", "restart")
    key: File | None = setting(None, "Private key (PEM) of the certificate.", "restart")

    @model_validator(mode="after")
    def _check_cert_has_key(self) -> ClientTls:
        if (self.cert is None) != (self.key is None):
            alone, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise SettingError(f"is set without {missing}", f"set {missing} too, or neither", key=alone)
        return self


class ServerTls(SettingsSection):
    """TLS of Tidevoy as a server."""

    cert: File = required("Tidevoy's server certificate (PEM).", "restart")
    key: File = required("Private key (PEM) of the certificate.", "restart")
    client_ca: File | None = setting(
        None,
        "CA (PEM) that client certificates must chain to; if set, clients need a certificate.",
        "restart",
    )


class XdsTls(ServerTls):
    """TLS with Envoys. The files are checked every second; new connections use the new certificates."""

    identity: Literal["node_id", "any"] = setting(
        "node_id",
        "Which Envoy ids a client certificate authorizes. node_id: only the ids it contains as a DNS name,"
        " as the last path segment of a URI, or, without any such name, as common name. any: every id.",
        "now",
    )

    @model_validator(mode="after")
    def _check_identity_has_client_ca(self) -> XdsTls:
        if "identity" in self.model_fields_set and self.client_ca is None:
            raise SettingError(
                "is set, but without client_ca no client sends a certificate",
                "set client_ca too, or remove identity",
                key="identity",
            )
        return self


class PdSettings(SettingsSection):
    """PD, where TiDB servers register."""

    urls: tuple[PdUrl, ...] = setting(
        (), "Client URLs of PD, e.g. [http://10.0.0.1:2379]; empty: no discovery.", "restart"
    )
    tls: ClientTls = section(ClientTls, "TLS to PD, used with https URLs.")
    keyspace: str | None = setting(
        None,
        "Numeric id of the keyspace to serve; default: nodes without one.",
        "restart",
        pattern=r"^(0|[1-9][0-9]*)$",
        coerce_numbers_to_str=True,
    )

    @model_validator(mode="after")
    def _check_urls(self) -> PdSettings:
        schemes = {url.partition(":")[0] for url in self.urls}
        if len(schemes) > 1:
            raise SettingError(
                "mixes http and https", "use the scheme that PD serves on all members", key="urls"
            )
        if len(set(self.urls)) < len(self.urls):
            duplicate = next(url for url in self.urls if self.urls.count(url) > 1)
            raise SettingError(f"{duplicate} is listed twice", "write each member once", key="urls")
        if schemes == {"http"} and self.tls != ClientTls():
            raise SettingError(
                "are http URLs, but pd.tls is set", "write https:// URLs, or remove pd.tls", key="urls"
            )
        return self


class StaticNodeSettings(SettingsSection):
    """Tidevoy does not discover these nodes; it only checks and serves them."""

    address: Address = required("SQL address, host:port.", "now")
    status_address: Address | None = setting(
        None, "Status address, host:port; default: status is not checked.", "now"
    )
    weight: int = setting(100, "Capacity relative to other nodes.", "now", ge=1, le=10_000)
    labels: dict[str, str] = setting({}, "Labels.", "now")


class CheckSettings(SettingsSection):
    """One kind of health check. Each node is probed every `interval` seconds, independently of other nodes.

    A node never has two probes of a kind in flight, so a silent node is detected after about `fall` times the
    longer of `interval` and `timeout`.
    """

    enabled: bool = setting(True, "Whether this check runs.", "now")
    interval: float = setting(
        1.0,
        "Seconds from the start of a probe to the start of the next.",
        "now",
        unit="seconds",
        ge=0.05,
        le=300,
    )
    timeout: float = setting(
        1.0,
        "Timeout of a probe; it may exceed `interval`, and then delays the next probe.",
        "now",
        unit="seconds",
        ge=0.01,
        le=60,
    )
    rise: int = setting(
        2, "Number of consecutive passes after which an unhealthy node is healthy again.", "now", ge=1, le=100
    )
    fall: int = setting(
        3, "Number of consecutive failures after which a node is unhealthy.", "now", ge=1, le=100
    )


class StatusCheckSettings(CheckSettings):
    """`GET /status` on the status port."""

    tls: bool = setting(
        False, "Whether the status port speaks HTTPS (TiDB: security.cluster-ssl-*).", "restart"
    )
    client_tls: ClientTls = section(ClientTls, "Tidevoy's side of that TLS.")

    @model_validator(mode="after")
    def _check_client_tls_is_used(self) -> StatusCheckSettings:
        if not self.tls and self.client_tls != ClientTls():
            raise SettingError(
                "is set, but tls is false", "set tls: true, or remove client_tls", key="client_tls"
            )
        return self


class SqlCheckSettings(CheckSettings):
    """A connection to the SQL port, on which the node must send its greeting."""


class HealthCheckSettings(SettingsSection):
    """Health checks of nodes."""

    status: StatusCheckSettings = section(StatusCheckSettings, "Checks the status that a node reports.")
    sql: SqlCheckSettings = section(SqlCheckSettings, "Checks whether a node accepts clients.")


class DrainSettings(SettingsSection):
    """Grace periods for nodes that leave, and for Envoys that reconnect."""

    registration_grace: float = setting(
        60.0,
        "Seconds for which a node that passes its checks stays active after its `ttl` in PD is lost.",
        "now",
        unit="seconds",
        ge=0,
        le=86400,
    )
    gone_grace: float = setting(
        600.0,
        "Seconds after which a node without `info` in PD is removed, even if it still has sessions.",
        "now",
        unit="seconds",
        ge=0,
        le=86400,
    )
    reconnect_grace: float = setting(
        15.0,
        "Seconds after a start of the control plane for Envoys to reconnect; no node counts as drained"
        " before.",
        "now",
        unit="seconds",
        ge=0,
        le=600,
    )


class EnvoyOverloadSettings(SettingsSection):
    """Limits that protect an Envoy from overload.

    They are part of its bootstrap: after a change, render it again with `tidevoy bootstrap` and restart the
    Envoy with it.
    """

    max_heap_bytes: int = setting(
        2_147_483_648,
        "Heap size at which an Envoy stops accepting connections (it shrinks caches at 95 %).",
        "new envoys",
        unit="bytes",
        ge=67_108_864,
        le=1 << 50,
    )
    max_connections: int = setting(
        50_000,
        "Number of client connections over all ports at which an Envoy resets new ones.",
        "new envoys",
        ge=1,
        le=10_000_000,
    )


class XdsSettings(SettingsSection):
    """The gRPC port that Envoys connect to."""

    listen: ListenAddressAnyPort = setting(
        "127.0.0.1:18000", "Address of the xDS server; port 0: any free one.", "restart"
    )
    tls: XdsTls | None = setting(None, "TLS of the xDS server; default: no TLS.", "restart")
    filter: Literal["auto", "module", "contrib", "none"] = setting(
        "auto",
        "MySQL filter of new Envoys. auto: Tidevoy's module if an Envoy reports a compatible version of it,"
        " else contrib's filter if it is built in, else none. `module` and `contrib` are tried whatever an"
        " Envoy reports; if the Envoy rejects it, it falls back.",
        "new envoys",
    )


class LogSettings(SettingsSection):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Lowest level that is written.", "now"
    )
    format: Literal["auto", "console", "json"] = setting(
        "auto", "auto: console on a terminal, else json.", "restart"
    )


class Settings(SettingsSection):
    """All settings."""

    pd: PdSettings = section(PdSettings, "Discovery.")
    nodes: tuple[StaticNodeSettings, ...] = setting(
        (), "Static TiDB servers, in addition to those from PD.", "now"
    )
    sql: SqlSettings = section(SqlSettings, "The port for SQL clients.")
    backend: BackendSettings = section(BackendSettings, "Connections to TiDB.")
    tls: SqlTlsSettings = section(SqlTlsSettings, "TLS of SQL traffic.")
    health: HealthCheckSettings = section(HealthCheckSettings, "Health checks.")
    balance: BalanceSettings = section(BalanceSettings, "Load balancing.")
    groups: tuple[GroupSettings, ...] = setting(
        (), "Groups of nodes; a node belongs to the first one that it matches.", "now"
    )
    zones: ZoneSettings = section(ZoneSettings, "Preference of local nodes.")
    backup: BackupSettings = section(BackupSettings, "Backup nodes.")
    drain: DrainSettings = section(DrainSettings, "Draining and removal of nodes.")
    migration: MigrationSettings = section(MigrationSettings, "Session migration.")
    rebalance: RebalanceSettings = section(RebalanceSettings, "Rebalancing of existing sessions.")
    rollouts: RolloutSettings = section(RolloutSettings, "Rolling operations.")
    overload: EnvoyOverloadSettings = section(EnvoyOverloadSettings, "Overload protection of an Envoy.")
    xds: XdsSettings = section(XdsSettings, "The port for Envoys.")
    api: ApiSettings = section(ApiSettings, "REST and console.")
    replicas: ReplicaSettings = section(ReplicaSettings, "Replicas of the control plane.")
    log: LogSettings = section(LogSettings, "Logging.")
    state_dir: Directory = setting(
        Path("/var/lib/tidevoy"), "Directory for intents and the last plan.", "restart"
    )
    allow_unauthenticated: bool = setting(
        False,
        "Allow xds.listen and api.listen on other addresses than loopback without authentication.",
        "restart",
    )

    @model_validator(mode="after")
    def _check_unique_nodes(self) -> Settings:
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.address in seen:
                raise SettingError(
                    f"{node.address} is listed twice", "write each node once", key=f"nodes.{index}.address"
                )
            seen.add(node.address)
        return self

    @model_validator(mode="after")
    def _check_unique_groups(self) -> Settings:
        names = [group.name for group in self.groups]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise SettingError(
                    f"{name} is listed twice", "give each group its own name", key=f"groups.{index}.name"
                )
        return self

    @model_validator(mode="after")
    def _check_distinct_ports(self) -> Settings:
        for (first_key, first), (second_key, second) in itertools.combinations(self._listeners(), 2):
            if _has_port_conflict(first.listen, second.listen):
                is_second_explicit = "listen" in second.model_fields_set
                key, other_key, other = (
                    (second_key, first_key, first) if is_second_explicit else (first_key, second_key, second)
                )
                raise SettingError(
                    f"{key} and {other_key} ({other.listen}) have the same port",
                    "choose another port for one of them",
                    key=key,
                )
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Settings:
        if self.allow_unauthenticated:
            return self
        if (
            not _is_loopback(self.api.listen)
            and (exposure_problem := self.api.exposure_problem()) is not None
        ):
            key, problem, remedy = exposure_problem
            raise SettingError(f"{self.api.listen} {problem}", remedy, key=f"api.{key}")
        if not _is_loopback(self.xds.listen) and (self.xds.tls is None or self.xds.tls.client_ca is None):
            raise SettingError(
                f"{self.xds.listen} can be reached from other machines, and the xDS server does not"
                " authenticate clients",
                "set xds.tls.client_ca, listen on 127.0.0.1, or set allow_unauthenticated: true",
                key="xds.listen",
            )
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Settings:
        tls = self.xds.tls
        self.replicas.check_usable(
            listen=self.xds.listen,
            has_pd=bool(self.pd.urls),
            requires_client_certs=None if tls is None else tls.client_ca is not None,
        )
        return self

    @model_validator(mode="after")
    def _check_sql_tls_has_module(self) -> Settings:
        if self.tls.tls_requirement and self.xds.filter in ("contrib", "none"):
            raise SettingError(
                f"is {self.xds.filter}, but {self.tls.tls_requirement}, which needs Tidevoy's module",
                "set auto or module",
                key="xds.filter",
            )
        return self

    def _listeners(self) -> tuple[tuple[str, SqlSettings | XdsSettings | ApiSettings | GroupSettings], ...]:
        groups = ((f"groups.{index}.listen", group) for index, group in enumerate(self.groups))
        return (("sql.listen", self.sql), ("xds.listen", self.xds), ("api.listen", self.api), *groups)


def _is_loopback(address: str) -> bool:
    ip = literal_host(address)
    return address.startswith("localhost:") if ip is None else ipaddress.ip_address(ip).is_loopback


def _has_port_conflict(one: str, other: str) -> bool:
    """Whether two listeners on one machine would bind the same port of the same address."""
    port = one.rpartition(":")[2]
    if port == "0" or port != other.rpartition(":")[2]:
        return False
    ips = [literal_host(address) for address in (one, other)]
    return ips[0] == ips[1] or any(ip is not None and ipaddress.ip_address(ip).is_unspecified for ip in ips)


def build_policy(settings: Settings) -> Policy:
    """Return the part of the settings that plans depend on."""
    return Policy(
        status_check=settings.health.status.enabled,
        sql_check=settings.health.sql.enabled,
        status_rise=settings.health.status.rise,
        status_fall=settings.health.status.fall,
        sql_rise=settings.health.sql.rise,
        sql_fall=settings.health.sql.fall,
        registration_grace=settings.drain.registration_grace,
        gone_grace=settings.drain.gone_grace,
        panic_threshold=settings.balance.panic_threshold,
        slow_start=settings.balance.slow_start,
        report_interval=settings.balance.report_interval,
        connect_timeout=settings.backend.connect_timeout,
        reconnect_grace=settings.drain.reconnect_grace,
        rebalance_enabled=settings.rebalance.enabled,
        rebalance_per_second=settings.rebalance.per_second,
        rebalance_threshold=settings.rebalance.threshold,
        status_interval=settings.health.status.interval,
        groups=tuple(Selected(group.name, group.labels) for group in settings.groups),
        backup_labels=settings.backup.labels,
        zone_label=settings.zones.label,
        zone_overload_ratio=settings.zones.overload_ratio,
        balance_policy=BalancePolicy(settings.balance.policy),
    )
