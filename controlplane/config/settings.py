"""Every setting, with its meaning, unit, default and what a change of it needs; no I/O here.

A file in YAML and environment variables (`TIDEVOY_` + path, `__` between levels) fill these models;
`controlplane.config.loader` reads them. Unknown keys are refused; a key without a value means its default.
`docs/reference/configuration.md` is made from this file and its parts, `config_*.py`. Each setting says when a change
takes effect:

* `now`: a reload (SIGHUP, or `POST /v1/config/reload`) applies it;
* `new envoys`: an Envoy gets it once, and keeps the old value until that Envoy is started again;
* `restart`: the control plane has to be started again.
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
    """How we present ourselves to a TLS server. A certificate and its key go together."""

    ca: File | None = setting(
        None, "CA bundle (PEM) that the server's certificate must chain to; default: the system's.", "restart"
    )
    cert: File | None = setting(None, "Our certificate (PEM), for mutual TLS.", "restart")
    key: File | None = setting(None, "The key (PEM) of our certificate.", "restart")

    @model_validator(mode="after")
    def _check_cert_has_key(self) -> ClientTls:
        if (self.cert is None) != (self.key is None):
            alone, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise SettingError(f"is set without {missing}", f"set {missing} too, or neither", key=alone)
        return self


class ServerTls(SettingsSection):
    """How we present ourselves to TLS clients."""

    cert: File = required("Our certificate (PEM).", "restart")
    key: File = required("The key (PEM) of our certificate.", "restart")
    client_ca: File | None = setting(
        None, "CA (PEM) that client certificates must chain to; set: clients need one.", "restart"
    )


class XdsTls(ServerTls):
    """TLS with Envoys. The files are looked at every second: who connects from then on gets the new ones."""

    identity: Literal["node_id", "any"] = setting(
        "node_id",
        "What a client certificate is good for. node_id: for the Envoy whose id it holds, as a DNS name, as"
        " the last part of a URI, or, without any such name, as common name. any: for every id.",
        "now",
    )

    @model_validator(mode="after")
    def _check_identity_has_client_ca(self) -> XdsTls:
        if "identity" in self.model_fields_set and self.client_ca is None:
            raise SettingError(
                "is set, but without client_ca nobody shows a certificate",
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
                "mixes http and https", "PD serves one of them on all members: write that", key="urls"
            )
        if len(set(self.urls)) < len(self.urls):
            twice = next(url for url in self.urls if self.urls.count(url) > 1)
            raise SettingError(f"{twice} stands there twice", "write each member once", key="urls")
        if schemes == {"http"} and self.tls != ClientTls():
            raise SettingError(
                "are http URLs, but pd.tls is set", "write https:// URLs, or remove pd.tls", key="urls"
            )
        return self


class StaticNodeSettings(SettingsSection):
    """A TiDB server named in the configuration."""

    address: Address = required("SQL address, host:port.", "now")
    status_address: Address | None = setting(
        None, "Status address, host:port; default: status is not checked.", "now"
    )
    weight: int = setting(100, "Capacity in relation to other nodes.", "now", ge=1, le=10_000)
    labels: dict[str, str] = setting({}, "Labels.", "now")


class CheckSettings(SettingsSection):
    """One kind of check. A node is probed every `interval` seconds, all nodes independently.

    No node ever has two probes of a kind under way, so a silent one is found out after about `fall` times the
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
        "Seconds after which a probe has failed; it may exceed `interval`, and then delays the next probe.",
        "now",
        unit="seconds",
        ge=0.01,
        le=60,
    )
    rise: int = setting(
        2, "Passes in a row after which an unhealthy node is healthy again.", "now", ge=1, le=100
    )
    fall: int = setting(3, "Failures in a row after which a node is unhealthy.", "now", ge=1, le=100)


class StatusCheckSettings(CheckSettings):
    """`GET /status` on the status port."""

    tls: bool = setting(
        False, "Whether the status port speaks HTTPS (TiDB: security.cluster-ssl-*).", "restart"
    )
    client_tls: ClientTls = section(ClientTls, "Our side of that TLS.")

    @model_validator(mode="after")
    def _check_client_tls_is_used(self) -> StatusCheckSettings:
        if not self.tls and self.client_tls != ClientTls():
            raise SettingError(
                "is set, but tls is false", "set tls: true, or remove client_tls", key="client_tls"
            )
        return self


class SqlCheckSettings(CheckSettings):
    """A connection to the SQL port, on which the node must greet."""


class HealthCheckSettings(SettingsSection):
    """How nodes are checked."""

    status: StatusCheckSettings = section(StatusCheckSettings, "What a node says of itself.")
    sql: SqlCheckSettings = section(SqlCheckSettings, "Whether a node would serve clients.")


class DrainSettings(SettingsSection):
    """How nodes leave."""

    registration_grace: float = setting(
        60.0,
        "Seconds a node that passes its checks stays active without `ttl` in PD.",
        "now",
        unit="seconds",
        ge=0,
        le=86400,
    )
    gone_grace: float = setting(
        600.0,
        "Seconds after which a node without `info` in PD is forgotten, sessions or not.",
        "now",
        unit="seconds",
        ge=0,
        le=86400,
    )
    fleet_return: float = setting(
        15.0,
        "Seconds after a start in which Envoys may come back; no node counts as drained before.",
        "now",
        unit="seconds",
        ge=0,
        le=600,
    )


class EnvoyOverloadSettings(SettingsSection):
    """Limits by which an Envoy protects itself.

    They are part of its bootstrap: after a change, render that again with `tidevoy bootstrap` and start the
    Envoy with it.
    """

    max_heap_bytes: int = setting(
        2_147_483_648,
        "Heap at which an Envoy stops accepting (it shrinks caches at 95 %).",
        "new envoys",
        unit="bytes",
        ge=67_108_864,
        le=1 << 50,
    )
    max_connections: int = setting(
        50_000,
        "Client connections at which an Envoy resets new ones, over all its ports.",
        "new envoys",
        ge=1,
        le=10_000_000,
    )


class XdsSettings(SettingsSection):
    """The gRPC port that Envoys connect to."""

    listen: ListenAddressAnyPort = setting(
        "127.0.0.1:18000", "Address of the xDS server; port 0: any free one.", "restart"
    )
    tls: XdsTls | None = setting(None, "TLS of the xDS server; default: plain.", "restart")
    filter: Literal["auto", "module", "contrib", "none"] = setting(
        "auto",
        "MySQL filter of new Envoys. auto: Tidevoy's module where an Envoy says that it has one that fits,"
        " else contrib's where it is built in, else none. `module` and `contrib` are tried whatever an Envoy"
        " says; one that refuses falls back.",
        "new envoys",
    )


class LogSettings(SettingsSection):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe line that is written.", "now"
    )
    format: Literal["auto", "console", "json"] = setting(
        "auto", "auto: console on a terminal, else json.", "restart"
    )


class Settings(SettingsSection):
    """All settings."""

    pd: PdSettings = section(PdSettings, "Discovery.")
    nodes: tuple[StaticNodeSettings, ...] = setting(
        (), "TiDB servers named by hand, beside those from PD.", "now"
    )
    sql: SqlSettings = section(SqlSettings, "The port for SQL clients.")
    backend: BackendSettings = section(BackendSettings, "Connections to TiDB.")
    tls: SqlTlsSettings = section(SqlTlsSettings, "TLS of SQL traffic.")
    health: HealthCheckSettings = section(HealthCheckSettings, "Checks.")
    balance: BalanceSettings = section(BalanceSettings, "Sharing out connections.")
    groups: tuple[GroupSettings, ...] = setting((), "Groups of nodes, in the order of choice.", "now")
    zones: ZoneSettings = section(ZoneSettings, "Nodes nearby.")
    backup: BackupSettings = section(BackupSettings, "Nodes that stand in.")
    drain: DrainSettings = section(DrainSettings, "Leaving nodes.")
    migration: MigrationSettings = section(MigrationSettings, "Moving sessions.")
    rebalance: RebalanceSettings = section(RebalanceSettings, "Sessions for nodes that have too few.")
    rollouts: RolloutSettings = section(RolloutSettings, "Rolling operations.")
    overload: EnvoyOverloadSettings = section(EnvoyOverloadSettings, "An Envoy's own protection.")
    xds: XdsSettings = section(XdsSettings, "The port for Envoys.")
    api: ApiSettings = section(ApiSettings, "REST and console.")
    replicas: ReplicaSettings = section(ReplicaSettings, "Control planes beside this one.")
    log: LogSettings = section(LogSettings, "Logging.")
    state_dir: Directory = setting(
        Path("/var/lib/tidevoy"), "Directory for intents and the last plan.", "restart"
    )
    allow_unauthenticated: bool = setting(
        False,
        "Let xds.listen and api.listen be other than loopback although nothing there asks who is calling.",
        "restart",
    )

    @model_validator(mode="after")
    def _check_unique_nodes(self) -> Settings:
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.address in seen:
                raise SettingError(
                    f"{node.address} stands there twice", "write each node once", key=f"nodes.{index}.address"
                )
            seen.add(node.address)
        return self

    @model_validator(mode="after")
    def _check_unique_groups(self) -> Settings:
        names = [group.name for group in self.groups]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise SettingError(
                    f"{name} stands there twice", "give each group its own name", key=f"groups.{index}.name"
                )
        return self

    @model_validator(mode="after")
    def _check_distinct_ports(self) -> Settings:
        for (one, first), (other, second) in itertools.combinations(self._listeners(), 2):
            if _has_port_conflict(first.listen, second.listen):
                chosen = "listen" in second.model_fields_set
                key, rival, taken = (other, one, first) if chosen else (one, other, second)
                raise SettingError(
                    f"{key} and {rival} ({taken.listen}) have the same port",
                    "choose another port for one of them",
                    key=key,
                )
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Settings:
        if self.allow_unauthenticated:
            return self
        if not _is_loopback(self.api.listen) and (exposure := self.api.exposure_problem()) is not None:
            key, problem, remedy = exposure
            raise SettingError(f"{self.api.listen} {problem}", remedy, key=f"api.{key}")
        if not _is_loopback(self.xds.listen) and (self.xds.tls is None or self.xds.tls.client_ca is None):
            raise SettingError(
                f"{self.xds.listen} can be reached from other machines, and the xDS server does not ask who"
                " is calling",
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
                f"is {self.xds.filter}, but {self.tls.tls_requirement}, which takes Tidevoy's module",
                "write auto or module",
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
    """Whether two listeners on one machine would ask for the same port of the same address."""
    port = one.rpartition(":")[2]
    if port == "0" or port != other.rpartition(":")[2]:
        return False
    ips = [literal_host(address) for address in (one, other)]
    return ips[0] == ips[1] or any(ip is not None and ipaddress.ip_address(ip).is_unspecified for ip in ips)


def build_policy(settings: Settings) -> Policy:
    """The part of the settings that decisions depend on."""
    return Policy(
        status_check=settings.health.status.enabled,
        sql_check=settings.health.sql.enabled,
        status_rise=settings.health.status.rise,
        status_fall=settings.health.status.fall,
        sql_rise=settings.health.sql.rise,
        sql_fall=settings.health.sql.fall,
        registration_grace=settings.drain.registration_grace,
        gone_grace=settings.drain.gone_grace,
        panic_threshold=settings.balance.floor,
        slow_start=settings.balance.slow_start,
        report_interval=settings.balance.report_interval,
        connect_timeout=settings.backend.connect_timeout,
        reconnect_grace=settings.drain.fleet_return,
        rebalance_enabled=settings.rebalance.enabled,
        rebalance_per_second=settings.rebalance.per_second,
        rebalance_threshold=settings.rebalance.threshold,
        status_interval=settings.health.status.interval,
        groups=tuple(Selected(group.name, group.labels) for group in settings.groups),
        backup_labels=settings.backup.labels,
        zone_label=settings.zones.label,
        zone_overload_ratio=settings.zones.spill,
        balance_policy=BalancePolicy(settings.balance.policy),
    )
