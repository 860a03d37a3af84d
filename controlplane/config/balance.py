"""Settings of load balancing, and of the node metrics that it uses."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, Literal

from pydantic import AfterValidator

from controlplane.config.types import File, SettingError, SettingsSection, ValueFormat, section, setting


def _validate_base_url(value: str) -> str:
    if "@" in value:  # not shown: it may hold a password
        raise SettingError(
            "the URL contains a user", "remove the part before the @, and set bearer_token_file"
        )
    try:
        parts = urllib.parse.urlsplit(value)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.scheme not in ("http", "https"):
        raise SettingError(f"{value!r} is not an http:// or https:// URL")
    if parts.query or parts.fragment:
        raise SettingError(f"{value!r} has a query or fragment", "write the base URL, without /api/v1/query")
    return value.rstrip("/")


def _validate_label_name(value: str) -> str:
    # prometheus.io/docs/concepts/data_model
    if not (value.isascii() and value.replace("_", "a").isalnum() and not value[0].isdigit()):
        raise SettingError(f"{value!r} is not a valid label name")
    return value


PrometheusUrl = Annotated[
    str, AfterValidator(_validate_base_url), ValueFormat("a URL, such as http://10.0.0.9:9090")
]
LabelName = Annotated[
    str,
    AfterValidator(_validate_label_name),
    ValueFormat("a name of letters, digits and _, such as instance"),
]


class NodeMetricsSettings(SettingsSection):
    """Reads `/metrics` on the status ports of at most 200 nodes, with the TLS settings of `health.status`."""

    enabled: bool = setting(True, "Whether CPU, memory and health metrics of the nodes are read.", "now")
    interval: float = setting(5.0, "Seconds between two reads.", "now", unit="seconds", ge=0.1, le=30)
    timeout: float = setting(3.0, "Timeout of a read.", "now", unit="seconds", ge=0.05, le=30)


class PrometheusSettings(SettingsSection):
    """A Prometheus server that scrapes the nodes, queried instead of them at `balance.metrics.interval`."""

    url: PrometheusUrl | None = setting(
        None, "Base URL of Prometheus, without /api/v1/query; default: the nodes themselves are read.", "now"
    )
    labels: dict[LabelName, str] = setting(
        {},
        'Labels that select the series of these nodes; default: job="tidb" or component="tidb".',
        "now",
    )
    instance_label: LabelName = setting(
        "instance",
        "Label that identifies the node: by host:port of its status port, by its host name, or by the first"
        " part of that (its pod).",
        "now",
    )
    ca: File | None = setting(
        None, "CA bundle (PEM) that the server's certificate must chain to; default: the system's.", "restart"
    )
    bearer_token_file: File | None = setting(
        None, "File with a bearer token to send; it is read for each query.", "now"
    )


class BalanceSettings(SettingsSection):
    """How sessions are distributed over the nodes."""

    policy: Literal["resource", "location", "connection"] = setting(
        "resource",
        "What counts besides connections and weights. resource: health, memory, CPU, then location; location:"
        " location first; connection: nothing else, and no metrics are read.",
        "now",
    )
    slow_start: float = setting(
        10.0,
        "Seconds over which a joining node ramps up to its full share; 0: at once.",
        "now",
        unit="seconds",
        ge=0,
        le=3600,
    )
    panic_threshold: float = setting(
        0.25,
        "Panic threshold: when less than this fraction of the nodes is healthy, health checks are ignored and"
        " failed nodes stay in service.",
        "now",
        ge=0,
        le=1,
    )
    report_interval: float = setting(
        1.0,
        "Seconds between two load reports of an Envoy, and between two reports of its module (at least 1, and"
        " only after a restart with a new bootstrap).",
        "now",
        unit="seconds",
        ge=0.1,
        le=60,
    )
    module_counts: Literal["all", "sessions"] = setting(
        "all",
        "What the module in an Envoy reports per node: all counters or, for fleets of more than 1,000 nodes,"
        " only sessions and migrations, on which plans depend.",
        "new envoys",
    )
    metrics: NodeMetricsSettings = section(NodeMetricsSettings, "Node metrics.")
    prometheus: PrometheusSettings = section(PrometheusSettings, "Node metrics from Prometheus.")

    @property
    def needs_node_metrics(self) -> bool:
        """Whether any node metrics are to be read."""
        return self.metrics.enabled and self.policy != "connection"
