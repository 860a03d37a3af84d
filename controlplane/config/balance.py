"""Settings of load balancing: policy, node metrics, groups, zones, backup nodes, migration, rebalancing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from controlplane.config.types import (
    EnvoyListenAddress,
    File,
    HttpUrl,
    SettingError,
    SettingsSection,
    ValueFormat,
    section,
    setting,
)

_MIB = 1 << 20

PrometheusUrl = Annotated[
    HttpUrl,
    AfterValidator(lambda url: url.rstrip("/")),
    ValueFormat("a URL without /api/v1/query, such as http://10.0.0.9:9090"),
]
LabelName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),  # prometheus.io/docs/concepts/data_model
    ValueFormat("a name of letters, digits and _, such as instance"),
]
GroupName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9-]{1,32}$"),
    ValueFormat("up to 32 lower-case letters, digits and hyphens, such as olap"),
]
Selector = Annotated[
    dict[str, str],
    Field(min_length=1),  # without labels, every node would be in the group
    ValueFormat("a mapping of at least one label to its value"),
]


class NodeMetricsSettings(SettingsSection):
    """Reads `/metrics` on the status ports of at most 200 nodes, with the TLS settings of `health.status`."""

    enabled: bool = setting(True)
    """Whether CPU, memory and health metrics of the nodes are read."""
    interval: float = setting(5.0, unit="seconds", ge=0.1, le=30)
    """Seconds between two reads."""
    timeout: float = setting(3.0, unit="seconds", ge=0.05, le=30)
    """Timeout of a read."""


class PrometheusSettings(SettingsSection):
    """A Prometheus server that scrapes the nodes. If it is set, Tidevoy queries it instead of the nodes, once
    per `balance.metrics.interval`.
    """

    url: PrometheusUrl | None = setting(None)
    """Base URL of Prometheus, without /api/v1/query; default: Tidevoy reads the nodes' own metrics."""
    labels: dict[LabelName, str] = setting({})
    """Labels that select the series of these nodes; default: job="tidb" or component="tidb"."""
    instance_label: LabelName = setting("instance")
    """Label whose value identifies the node: host:port of its status port, its host name, or the part of the
    host name before the first dot (the name of its pod)."""
    ca: File | None = setting(None, takes_effect="restart")
    """CA bundle (PEM) that the server's certificate must chain to; default: the system's."""
    bearer_token_file: File | None = setting(None)
    """File with a bearer token to send; it is read for each query."""


class BalanceSettings(SettingsSection):
    """How sessions are distributed over the nodes."""

    policy: Literal["resource", "location", "connection"] = setting("resource")
    """Factors of a node's share besides connections and weights, most important first. resource: health,
    memory, CPU, location; location: location, health, memory, CPU; connection: none, and no metrics are
    read."""
    slow_start: float = setting(10.0, unit="seconds", ge=0, le=3600)
    """Seconds over which a joining node ramps up to its full share; 0: at once."""
    panic_threshold: float = setting(0.25, ge=0, le=1)
    """If less than this fraction of the nodes is healthy, Tidevoy ignores health checks, and failed nodes
    stay in service."""
    report_interval: float = setting(1.0, takes_effect="new envoys", unit="seconds", ge=0.1, le=60)
    """Seconds between two load reports of an Envoy; a change applies to running Envoys at once. The module
    of an Envoy reports at the same interval, but at most once per second, and applies a change when the Envoy
    is restarted with a new bootstrap."""
    module_counts: Literal["all", "sessions"] = setting("all", takes_effect="new envoys")
    """What an Envoy's module reports per node. all: all counters. sessions: only sessions and migrations,
    which plans need; for fleets of more than 1,000 nodes."""
    metrics: NodeMetricsSettings = section(NodeMetricsSettings, "Node metrics.")
    prometheus: PrometheusSettings = section(PrometheusSettings, "Node metrics from Prometheus.")

    @property
    def needs_node_metrics(self) -> bool:
        """Whether node metrics are read."""
        return self.metrics.enabled and self.policy != "connection"


class GroupSettings(SettingsSection):
    """A separate port on every Envoy; its clients reach only nodes that have all labels of the group.

    Clients of `sql.listen` reach the nodes that match no group. Running Envoys get listeners for new groups,
    but existing listeners do not change.
    """

    name: GroupName = setting(..., takes_effect="new envoys")
    """Name of the group; an Envoy can be started for this group alone (`tidevoy bootstrap --group`)."""
    listen: EnvoyListenAddress = setting(..., takes_effect="new envoys")
    """Address on which each Envoy listens for clients of the group."""
    labels: Selector = setting(...)
    """A node belongs to the group if it has all of these labels."""


class ZoneSettings(SettingsSection):
    """How an Envoy prefers nodes of its own zone (`tidevoy bootstrap --zone`)."""

    label: str = setting("zone")
    """Node label that holds the node's zone."""
    overload_ratio: float = setting(1.5, ge=1.1, le=100)
    """When the nodes of a zone have this many times the average load of their group, the Envoys of that zone
    also use nodes of other zones (policy `resource` only)."""


class BackupSettings(SettingsSection):
    """Nodes that get sessions only while all other nodes of their group are out of service."""

    labels: dict[str, str] = setting({})
    """A node that has all of these labels is a backup node; empty: there are no backup nodes."""


class MigrationSettings(SettingsSection):
    """Limits of all migrations of one Envoy, whatever their cause (module only)."""

    max_per_second: float = setting(500.0, unit="sessions", ge=0, le=100_000)
    """Maximum number of migrations that one Envoy starts per second; 0: sessions never migrate."""
    max_concurrent: int = setting(64, unit="sessions", ge=1, le=10_000)
    """Maximum number of concurrent migrations of one Envoy."""
    max_state_bytes: int = setting(4 * _MIB, unit="bytes", ge=65_536, le=64 * _MIB)
    """Maximum size of the session states (variables, prepared statements and so on) of one session; a session
    with more does not migrate."""
    max_total_state_bytes: int = setting(256 * _MIB, unit="bytes", ge=262_144, le=64 << 30)
    """Memory limit of one Envoy for session states: of migrating sessions, and of sessions whose node may
    fail. The latter use at most half of it. Must be at least four times `max_state_bytes`."""

    @model_validator(mode="after")
    def _check_states_budget(self) -> MigrationSettings:
        # Escaping quotes may double a state, and only half of the memory is guaranteed for migrations.
        if self.max_total_state_bytes < 4 * self.max_state_bytes:
            raise SettingError(
                f"{self.max_total_state_bytes} is less than four times max_state_bytes"
                f" ({self.max_state_bytes})",
                f"set {4 * self.max_state_bytes} or more, or reduce max_state_bytes",
                key="max_total_state_bytes",
            )
        return self


class RebalanceSettings(SettingsSection):
    """How existing sessions migrate to nodes that are below their fair share (module only)."""

    enabled: bool = setting(True)
    """Whether sessions migrate from nodes above their fair share to nodes below it."""
    max_per_second: float = setting(200.0, unit="sessions", ge=1, le=100_000)
    """Maximum number of sessions that migrate for rebalancing per second in the whole fleet, on average over
    up to 5 s."""
    threshold: float = setting(0.05, ge=0, le=10)
    """Tolerance: a node may exceed its fair share by this fraction, or be below it by twice as much, before
    sessions migrate. Differences within random noise never cause migrations."""
