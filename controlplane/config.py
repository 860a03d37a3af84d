"""Every setting, with its meaning, unit, default and what a change of it needs; no I/O here.

A file in YAML and environment variables (`TIDEVOY_` + path, `__` between levels) fill these models;
`controlplane.settings_file` reads them. Unknown keys are refused. Each setting says when a change takes effect:

* `now`: a reload (SIGHUP, or `POST /v1/config/reload`) applies it;
* `new envoys`: it is part of what an Envoy gets once; `tidevoy envoys recycle` or a restart of that Envoy;
* `restart`: the control plane has to be started again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from controlplane import address as addresses
from controlplane.model import Policy

Change = Literal["now", "new envoys", "restart"]


def setting(default: Any, meaning: str, change: Change, **limits: Any) -> Any:
    """A documented field. `limits` are pydantic's (`ge`, `le`, `min_length`, ...)."""
    return Field(default, description=meaning, json_schema_extra={"change": change}, **limits)


def section(model: type[BaseModel], meaning: str) -> Any:
    """A documented group of settings, each of which says for itself what a change needs."""
    return Field(default_factory=model, description=meaning)


def _address(value: str) -> str:
    host, port = addresses.split(value)
    return addresses.join(host, port)


def _file(value: Path) -> Path:
    if not value.is_file():
        raise ValueError(f"there is no file {value}")
    return value


def _pd_url(value: str) -> str:
    scheme, sep, rest = value.partition("://")
    if not sep or scheme not in ("http", "https"):
        raise ValueError(f"{value!r} does not begin with http:// or https://")
    host, port = addresses.split(rest.rstrip("/"))
    return f"{scheme}://{addresses.join(host, port)}"


Address = Annotated[str, AfterValidator(_address)]
PdUrl = Annotated[str, AfterValidator(_pd_url)]
File = Annotated[Path, AfterValidator(_file)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class ClientTls(_Section):
    """How we present ourselves to a TLS server. A certificate and its key go together."""

    ca: File | None = setting(
        None, "CA bundle (PEM) that the server's certificate must chain to; default: the system's.", "restart"
    )
    cert: File | None = setting(None, "Our certificate (PEM), for mutual TLS.", "restart")
    key: File | None = setting(None, "The key (PEM) of our certificate.", "restart")

    @model_validator(mode="after")
    def _pair(self) -> ClientTls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together: set both, or neither")
        return self


class ServerTls(_Section):
    """How we present ourselves to TLS clients."""

    cert: File = Field(description="Our certificate (PEM).", json_schema_extra={"change": "restart"})
    key: File = Field(
        description="The key (PEM) of our certificate.", json_schema_extra={"change": "restart"}
    )
    client_ca: File | None = setting(
        None, "CA (PEM) that client certificates must chain to; set: clients need one.", "restart"
    )


class Sql(_Section):
    """The port that SQL clients connect to, on every Envoy."""

    listen: Address = setting(
        "0.0.0.0:6000", "Address on which each Envoy listens for SQL clients.", "new envoys"
    )
    max_connections: int = setting(
        0, "Most client connections of one Envoy; 0: no limit of ours.", "new envoys", ge=0, le=10_000_000
    )
    idle_timeout: float = setting(
        0.0, "Seconds without a byte after which a session is ended; 0: never.", "new envoys", ge=0
    )
    keepalive_idle: int = setting(
        60, "Seconds of silence before TCP keepalive probes a client.", "new envoys", ge=1, le=32767
    )
    keepalive_interval: int = setting(10, "Seconds between two such probes.", "new envoys", ge=1, le=32767)
    keepalive_probes: int = setting(
        3, "Unanswered probes after which the connection counts as dead.", "new envoys", ge=1, le=127
    )
    proxy_protocol: Literal["off", "optional", "required"] = setting(
        "off", "PROXY protocol from clients (v1 and v2); `optional` trusts whoever sends one.", "new envoys"
    )


class Backend(_Section):
    """Connections from Envoys to TiDB."""

    connect_timeout: float = setting(
        1.0, "Seconds an Envoy waits for a TCP connection to a node.", "now", gt=0, le=60
    )
    max_connect_attempts: int = setting(
        3, "Nodes that an Envoy tries for one client before it gives up.", "new envoys", ge=1, le=20
    )
    max_connections: int = setting(
        0, "Most connections of one Envoy to all nodes; 0: no limit of ours.", "now", ge=0, le=10_000_000
    )
    eject_seconds: float = setting(
        5.0, "Seconds an Envoy avoids a node after a failed connect, on its own.", "now", gt=0, le=300
    )
    keepalive_idle: int = setting(
        60, "Seconds of silence before TCP keepalive probes a node.", "now", ge=1, le=32767
    )
    keepalive_interval: int = setting(3, "Seconds between two such probes.", "now", ge=1, le=32767)
    keepalive_probes: int = setting(
        5, "Unanswered probes after which the connection counts as dead.", "now", ge=1, le=127
    )
    proxy_protocol: Literal["off", "v1", "v2"] = setting(
        "off", "PROXY protocol to TiDB (its `proxy-protocol.networks` must name the Envoys).", "now"
    )


class Pd(_Section):
    """PD, where TiDB servers register."""

    urls: tuple[PdUrl, ...] = setting(
        (), "Client URLs of PD, e.g. [http://10.0.0.1:2379]; empty: no discovery.", "restart"
    )
    tls: ClientTls = section(ClientTls, "TLS to PD, used with https URLs.")
    keyspace: str | None = setting(
        None,
        "Numeric id of the keyspace to serve; default: nodes without one.",
        "restart",
        pattern=r"^[0-9]+$",
    )

    @model_validator(mode="after")
    def _one_scheme(self) -> Pd:
        if len({url.partition(":")[0] for url in self.urls}) > 1:
            raise ValueError("urls mix http and https; PD serves one of them on all members")
        return self


class StaticNode(_Section):
    """A TiDB server named in the configuration."""

    address: Address = Field(description="SQL address, host:port.", json_schema_extra={"change": "now"})
    status_address: Address | None = setting(
        None, "Status address, host:port; default: status is not checked.", "now"
    )
    weight: int = setting(100, "Capacity in relation to other nodes.", "now", ge=1, le=10_000)
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels.", json_schema_extra={"change": "now"}
    )


class Check(_Section):
    """One kind of check. A node is probed every `interval` seconds, all nodes independently."""

    enabled: bool = setting(True, "Whether this check runs.", "now")
    interval: float = setting(
        1.0, "Seconds from the start of a probe to the start of the next.", "now", ge=0.05, le=300
    )
    timeout: float = setting(1.0, "Seconds after which a probe has failed.", "now", ge=0.01, le=60)
    rise: int = setting(
        2, "Passes in a row after which an unhealthy node is healthy again.", "now", ge=1, le=100
    )
    fall: int = setting(3, "Failures in a row after which a node is unhealthy.", "now", ge=1, le=100)


class StatusCheck(Check):
    """`GET /status` on the status port."""

    tls: bool = setting(
        False, "Whether the status port speaks HTTPS (TiDB: security.cluster-ssl-*).", "restart"
    )
    client_tls: ClientTls = section(ClientTls, "Our side of that TLS.")


class SqlCheck(Check):
    """A connection to the SQL port; the node must greet."""


class HealthChecks(_Section):
    """How nodes are checked."""

    status: StatusCheck = section(StatusCheck, "The status port.")
    sql: SqlCheck = section(SqlCheck, "The SQL port.")


class Balance(_Section):
    """How new connections are shared out."""

    slow_start: float = setting(
        30.0,
        "Seconds over which a node that joins grows to its full share; 0: at once.",
        "now",
        ge=0,
        le=3600,
    )
    floor: float = setting(
        0.25,
        "When less than this share of the nodes is healthy, checks are distrusted and failed nodes stay in service.",
        "now",
        ge=0,
        le=1,
    )
    report_interval: float = setting(
        1.0, "Seconds between the load reports of an Envoy.", "now", ge=0.1, le=60
    )


class Drains(_Section):
    """How nodes leave."""

    registration_grace: float = setting(
        60.0, "Seconds a node that passes its checks stays active without `ttl` in PD.", "now", ge=0, le=86400
    )
    gone_grace: float = setting(
        600.0,
        "Seconds after which a node without `info` in PD is forgotten, sessions or not.",
        "now",
        ge=0,
        le=86400,
    )


class Overload(_Section):
    """Limits by which an Envoy protects itself; part of its bootstrap."""

    max_heap_bytes: int = setting(
        2_147_483_648,
        "Heap at which an Envoy stops accepting (it shrinks caches at 95 %).",
        "new envoys",
        ge=67_108_864,
    )
    max_connections: int = setting(
        50_000,
        "Client connections at which an Envoy resets new ones, over all its ports.",
        "new envoys",
        ge=1,
        le=10_000_000,
    )


class Xds(_Section):
    """The gRPC port that Envoys connect to."""

    listen: Address = setting("127.0.0.1:18000", "Address of the xDS server.", "restart")
    tls: ServerTls | None = setting(None, "TLS of the xDS server; default: plain.", "restart")
    filter: Literal["auto", "contrib", "none"] = setting(
        "auto",
        "MySQL filter in new Envoys: contrib's where it is built in (auto), demanded, or none.",
        "new envoys",
    )


class Api(_Section):
    """REST and console."""

    listen: Address = setting("127.0.0.1:3080", "Address of the REST server.", "restart")


class Log(_Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe line that is written.", "now"
    )
    format: Literal["auto", "console", "json"] = setting(
        "auto", "auto: console on a terminal, else json.", "restart"
    )


class Settings(_Section):
    """All settings."""

    pd: Pd = section(Pd, "Discovery.")
    nodes: tuple[StaticNode, ...] = setting((), "TiDB servers named by hand, beside those from PD.", "now")
    sql: Sql = section(Sql, "The port for SQL clients.")
    backend: Backend = section(Backend, "Connections to TiDB.")
    health: HealthChecks = section(HealthChecks, "Checks.")
    balance: Balance = section(Balance, "Sharing out connections.")
    drain: Drains = section(Drains, "Leaving nodes.")
    overload: Overload = section(Overload, "An Envoy's own protection.")
    xds: Xds = section(Xds, "The port for Envoys.")
    api: Api = section(Api, "REST and console.")
    log: Log = section(Log, "Logging.")
    state_dir: Path = setting(Path("/var/lib/tidevoy"), "Directory for intents and the last plan.", "restart")
    allow_unauthenticated: bool = setting(
        False,
        "Let xds.listen and api.listen be other than loopback although nothing there asks who is calling.",
        "restart",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.address in seen:
                raise ValueError(f"nodes.{index}.address: {node.address} stands there twice")
            seen.add(node.address)
        return self


def policy(settings: Settings) -> Policy:
    """The part of the settings that decisions depend on."""
    return Policy(
        status_rise=settings.health.status.rise,
        status_fall=settings.health.status.fall,
        sql_rise=settings.health.sql.rise,
        sql_fall=settings.health.sql.fall,
        registration_grace=settings.drain.registration_grace,
        gone_grace=settings.drain.gone_grace,
        floor=settings.balance.floor,
        slow_start=settings.balance.slow_start,
        report_interval=settings.balance.report_interval,
    )


__all__ = ["Settings", "policy", "Change"]
