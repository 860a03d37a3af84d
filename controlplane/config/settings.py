"""All settings with meaning, unit, default, and when a change takes effect; no I/O here.

The tables in `docs/reference/configuration.md` are generated from these models.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import model_validator

from controlplane import address as addresses
from controlplane.config.api import ApiSettings
from controlplane.config.balance import (
    BackupSettings,
    BalanceSettings,
    GroupSettings,
    MigrationSettings,
    RebalanceSettings,
    ZoneSettings,
)
from controlplane.config.capture import CaptureSettings
from controlplane.config.envoy import EnvoyEndSettings, EnvoyHealthSettings, EnvoyOverloadSettings
from controlplane.config.limits import LimitSettings
from controlplane.config.login import LoginSettings
from controlplane.config.module import ModuleSettings
from controlplane.config.own_tls import ClientTls, XdsTls
from controlplane.config.replicas import ReplicaSettings
from controlplane.config.rollouts import RolloutSettings
from controlplane.config.sql import BackendSettings, SqlSettings
from controlplane.config.statements import StatementSettings
from controlplane.config.tls import SqlTlsSettings
from controlplane.config.types import (
    Address,
    Directory,
    ListenAddress,
    PdUrl,
    SettingError,
    SettingsSection,
    ValueFormat,
    literal_host,
    reject_duplicates,
    section,
    setting,
)
from controlplane.model.nodes import NodeGroup as Selected
from controlplane.model.plan import BalancePolicy, Policy


class PdSettings(SettingsSection):
    """PD, where TiDB servers register."""

    urls: tuple[PdUrl, ...] = setting((), takes_effect="restart")
    """Client URLs of PD, e.g. [http://10.0.0.1:2379]; if empty, Tidevoy discovers no nodes in PD."""
    tls: ClientTls = section(ClientTls, "TLS to PD, used with https URLs.")
    keyspace: Annotated[str, ValueFormat("digits without leading zeros, such as 5")] | None = setting(
        None, takes_effect="restart", pattern=r"^(0|[1-9][0-9]*)$", coerce_numbers_to_str=True
    )
    """Numeric id of the keyspace to serve; default: nodes without a keyspace."""

    @model_validator(mode="after")
    def _check_urls(self) -> PdSettings:
        schemes = {url.partition(":")[0] for url in self.urls}
        if len(schemes) > 1:
            raise SettingError(
                "mixes http and https", "use the scheme that PD serves on all members", key="urls"
            )
        reject_duplicates("urls.{}", self.urls, "write each member once")
        if schemes == {"http"} and self.tls != ClientTls():
            raise SettingError(
                "are http URLs, but pd.tls is set", "write https:// URLs, or remove pd.tls", key="urls"
            )
        return self


class StaticNodeSettings(SettingsSection):
    """A node that is configured here instead of discovered in PD."""

    address: Address = setting(...)
    """SQL address, host:port."""
    status_address: Address | None = setting(None)
    """Status address, host:port; default: status is not checked."""
    weight: int = setting(100, ge=1, le=10_000)
    """Capacity relative to other nodes."""
    labels: dict[str, str] = setting({})
    """Labels of the node, for groups, zones and backup nodes."""


class CheckSettings(SettingsSection):
    """One kind of health check. Each node is probed every `interval` seconds, independently of other nodes.

    Probes of a kind never overlap at a node, so a node that does not answer is detected after about `fall`
    times the longer of `interval` and `timeout`.
    """

    enabled: bool = setting(True)
    """Whether this check runs."""
    interval: float = setting(1.0, unit="seconds", ge=0.05, le=300)
    """Seconds from the start of a probe to the start of the next."""
    timeout: float = setting(1.0, unit="seconds", ge=0.01, le=60)
    """Timeout of a probe. If it exceeds `interval`, a slow probe delays the next one."""
    rise: int = setting(2, ge=1, le=100)
    """Number of consecutive passes after which an unhealthy node is healthy again."""
    fall: int = setting(3, ge=1, le=100)
    """Number of consecutive failures after which a node is unhealthy."""


class StatusCheckSettings(CheckSettings):
    """`GET /status` on the status port."""

    tls: bool = setting(False, takes_effect="restart")
    """Whether the status port speaks HTTPS (TiDB: security.cluster-ssl-*)."""
    client_tls: ClientTls = section(ClientTls, "TLS to the status ports, if `health.status.tls` is true.")

    @model_validator(mode="after")
    def _check_client_tls_is_used(self) -> StatusCheckSettings:
        if not self.tls and self.client_tls != ClientTls():
            raise SettingError(
                "is set, but tls is false", "set tls: true, or remove client_tls", key="client_tls"
            )
        return self


class SqlCheckSettings(CheckSettings):
    """A connection to the SQL port, on which the node must send its greeting."""


class StatementCheckSettings(LoginSettings, CheckSettings):
    """A login to the SQL port, and a statement that must end within `timeout`.

    It finds a node that greets and answers `GET /status`, but runs no statements. Each probe opens a session
    and closes it. After `fall` timeouts in a row, a node is probed only every 30 s. If a node rejects the
    login or the statement because of the user, its privileges or the settings here, the other checks alone
    decide about the node. While a node has too many connections (error 1040), its previous result stays.
    """

    enabled: bool = setting(False)
    """Whether this check runs; it needs `user`."""
    interval: float = setting(5.0, unit="seconds", ge=0.05, le=300)
    """Seconds from the start of a probe to the start of the next."""
    timeout: float = setting(3.0, unit="seconds", ge=0.1, le=60)
    """Timeout of the login and the statement together."""

    @model_validator(mode="after")
    def _check_user(self) -> StatementCheckSettings:
        if self.enabled and self.user is None:
            raise SettingError("is true, but user is not set", "set user too", key="enabled")
        return self


class HealthCheckSettings(SettingsSection):
    """Health checks of nodes."""

    status: StatusCheckSettings = section(StatusCheckSettings, "Checks the status that a node reports.")
    sql: SqlCheckSettings = section(SqlCheckSettings, "Checks whether a node accepts clients.")
    statement: StatementCheckSettings = section(
        StatementCheckSettings, "Checks whether a node runs statements."
    )


class DrainSettings(SettingsSection):
    """Grace periods for nodes that leave, and for Envoys that reconnect."""

    registration_grace: float = setting(60.0, unit="seconds", ge=0, le=86400)
    """Seconds for which a node that passes its checks stays active after its key `ttl` in PD has expired."""
    gone_grace: float = setting(600.0, unit="seconds", ge=0, le=86400)
    """Seconds after which a node without the key `info` in PD is removed, even if it still has sessions."""
    reconnect_grace: float = setting(15.0, unit="seconds", ge=0, le=600)
    """Seconds that Envoys have to reconnect after a start of the control plane; until then, no node counts as
    drained, and `KILL` is refused."""


class XdsSettings(SettingsSection):
    """The gRPC port that Envoys connect to."""

    listen: ListenAddress = setting("127.0.0.1:18000", takes_effect="restart")
    """Address of the xDS server; port 0 means any free port."""
    tls: XdsTls | None = setting(None, takes_effect="restart")
    """TLS of the xDS server; default: no TLS."""
    filter: Literal["auto", "module", "contrib", "none"] = setting("auto", takes_effect="new envoys")
    """MySQL filter of new Envoys. auto: Tidevoy's module if the Envoy reports a compatible version of it,
    else the MySQL filter of Envoy's contrib build if the Envoy has it, else none. `module` and `contrib` are
    sent even to Envoys that do not report this filter. An Envoy that rejects its filter gets the next one in
    the order of `auto`."""


class LogSettings(SettingsSection):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info")
    """Lowest level that is written."""
    format: Literal["auto", "console", "json"] = setting("auto", takes_effect="restart")
    """auto: console on a terminal, else json."""


class Settings(SettingsSection):
    """All settings."""

    pd: PdSettings = section(PdSettings, "Discovery.")
    nodes: tuple[StaticNodeSettings, ...] = setting(())
    """Static TiDB servers, in addition to those from PD."""
    sql: SqlSettings = section(SqlSettings, "The port for SQL clients.")
    backend: BackendSettings = section(BackendSettings, "Connections to TiDB.")
    limits: LimitSettings = section(LimitSettings, "Limits of client connections over all Envoys.")
    statements: StatementSettings = section(StatementSettings, "Statistics, log and rules of statements.")
    capture: CaptureSettings = section(CaptureSettings, "Captures of the traffic of clients.")
    tls: SqlTlsSettings = section(SqlTlsSettings, "TLS of SQL traffic.")
    health: HealthCheckSettings = section(HealthCheckSettings, "Health checks.")
    balance: BalanceSettings = section(BalanceSettings, "Load balancing.")
    groups: tuple[GroupSettings, ...] = setting(())
    """Groups of nodes; a node belongs to the first one that it matches."""
    zones: ZoneSettings = section(ZoneSettings, "Preference of local nodes.")
    backup: BackupSettings = section(BackupSettings, "Backup nodes.")
    drain: DrainSettings = section(DrainSettings, "Draining and removal of nodes.")
    module: ModuleSettings = section(ModuleSettings, "Switches of parts of the module.")
    migration: MigrationSettings = section(MigrationSettings, "Session migration.")
    rebalance: RebalanceSettings = section(RebalanceSettings, "Rebalancing of existing sessions.")
    rollouts: RolloutSettings = section(RolloutSettings, "Rolling operations.")
    overload: EnvoyOverloadSettings = section(EnvoyOverloadSettings, "Overload protection of an Envoy.")
    envoy_health: EnvoyHealthSettings = section(EnvoyHealthSettings, "Health of an Envoy for load balancers.")
    end: EnvoyEndSettings = section(EnvoyEndSettings, "How an Envoy ends.")
    xds: XdsSettings = section(XdsSettings, "The port for Envoys.")
    api: ApiSettings = section(ApiSettings, "REST and console.")
    replicas: ReplicaSettings = section(ReplicaSettings, "Replicas of the control plane.")
    log: LogSettings = section(LogSettings, "Logging.")
    state_dir: Directory = setting(Path("/var/lib/tidevoy"), takes_effect="restart")
    """Directory for intents and the last plan."""
    allow_unauthenticated: bool = setting(False, takes_effect="restart")
    """Allow xds.listen and api.listen to be reachable from other machines without authentication."""

    @model_validator(mode="after")
    def _check_unique_names(self) -> Settings:
        reject_duplicates("nodes.{}.address", [node.address for node in self.nodes], "write each node once")
        names = [group.name for group in self.groups]
        reject_duplicates("groups.{}.name", names, "give each group its own name")
        return self

    @model_validator(mode="after")
    def _check_distinct_ports(self) -> Settings:
        for one, two in itertools.combinations(self._listeners(), 2):
            if _has_port_conflict(one.address, two.address):
                wrong, other = (two, one) if two.is_explicit else (one, two)
                raise SettingError(
                    f"{wrong.key} and {other.key} ({other.address}) have the same port",
                    "choose another port for one of them",
                    key=wrong.key,
                )
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Settings:
        if self.allow_unauthenticated:
            return self
        if not addresses.is_loopback(self.api.listen) and (exposure_problem := self.api.exposure_problem()):
            problem, remedy = exposure_problem
            raise SettingError(f"{self.api.listen} {problem}", remedy, key="api.listen")
        if not addresses.is_loopback(self.xds.listen) and (
            self.xds.tls is None or self.xds.tls.client_ca is None
        ):
            raise SettingError(
                f"{self.xds.listen} can be reached from other machines, and the xDS server does not"
                " authenticate clients",
                "set xds.tls.client_ca, listen on 127.0.0.1, or set allow_unauthenticated: true",
                key="xds.listen",
            )
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Settings:
        if not self.replicas.enabled:
            return self
        if not self.pd.urls:
            raise SettingError(
                "is true, but there is no PD to share the state in", "set pd.urls", key="replicas.enabled"
            )
        ip = literal_host(self.xds.listen)
        if self.replicas.advertise is None and ip is not None and ip.is_unspecified:
            raise SettingError(
                f"is not set, and other replicas cannot connect to {self.xds.listen}",
                "write the address at which they reach this replica",
                key="replicas.advertise",
            )
        if self.xds.tls is not None and self.xds.tls.client_ca is None:
            raise SettingError(
                "is not set, but replicas authenticate to each other by client certificates",
                "set it",
                key="xds.tls.client_ca",
            )
        return self

    @model_validator(mode="after")
    def _check_module_is_allowed(self) -> Settings:
        if self.module_requirement and self.xds.filter in ("contrib", "none"):
            raise SettingError(
                f"is {self.xds.filter}, but {self.module_requirement}, which needs Tidevoy's module",
                "set auto or module",
                key="xds.filter",
            )
        return self

    @property
    def module_requirement(self) -> str:
        """The settings that require the module, as the start of a sentence; empty if there are none."""
        required = {f"tls.{side}.mode": "required" for side in self.tls.required_sides}
        if self.sql.proxy_protocol == "optional":
            required["sql.proxy_protocol"] = "optional"
        return " and ".join(f"{key} is set to {value}" for key, value in required.items())

    def _listeners(self) -> list[_Listener]:
        sections: list[tuple[str, SettingsSection, str | None]] = [
            ("sql", self.sql, self.sql.listen),
            ("xds", self.xds, self.xds.listen),
            ("api", self.api, self.api.listen),
            *((f"groups.{index}", group, group.listen) for index, group in enumerate(self.groups)),
            ("envoy_health", self.envoy_health, self.envoy_health.listen),
        ]
        return [
            _Listener(f"{name}.listen", address, "listen" in part.model_fields_set)
            for name, part, address in sections
            if address is not None
        ]


class _Listener(NamedTuple):
    """A setting with a port. `is_explicit`: the settings name the port, so it is no default."""

    key: str
    address: str
    is_explicit: bool


def _has_port_conflict(one: str, other: str) -> bool:
    """Return whether two listeners on one machine would bind the same port of the same address."""
    port = one.rpartition(":")[2]
    if port == "0" or port != other.rpartition(":")[2]:
        return False
    ips = [literal_host(address) for address in (one, other)]
    return ips[0] == ips[1] or any(ip is not None and ip.is_unspecified for ip in ips)


def build_policy(settings: Settings) -> Policy:
    """Return the part of the settings that plans depend on."""
    return Policy(
        status_check=settings.health.status.enabled,
        sql_check=settings.health.sql.enabled,
        statement_check=settings.health.statement.enabled,
        status_rise=settings.health.status.rise,
        status_fall=settings.health.status.fall,
        sql_rise=settings.health.sql.rise,
        sql_fall=settings.health.sql.fall,
        statement_rise=settings.health.statement.rise,
        statement_fall=settings.health.statement.fall,
        registration_grace=settings.drain.registration_grace,
        gone_grace=settings.drain.gone_grace,
        panic_threshold=settings.balance.panic_threshold,
        slow_start=settings.balance.slow_start,
        report_interval=settings.balance.report_interval,
        connect_timeout=settings.backend.connect_timeout,
        reconnect_grace=settings.drain.reconnect_grace,
        rebalance_enabled=settings.rebalance.enabled,
        rebalance_per_second=settings.rebalance.max_per_second,
        rebalance_threshold=settings.rebalance.threshold,
        status_interval=settings.health.status.interval,
        groups=tuple(Selected(group.name, group.labels) for group in settings.groups),
        backup_labels=settings.backup.labels,
        zone_label=settings.zones.label,
        zone_overload_ratio=settings.zones.overload_ratio,
        balance_policy=BalancePolicy(settings.balance.policy),
        module_switches=settings.module.switches,
        limits=settings.limits.to_rules(),
        rules=settings.statements.rule_list,
        capture_directory=None if settings.capture.directory is None else str(settings.capture.directory),
    )
