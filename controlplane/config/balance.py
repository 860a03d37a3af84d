"""How sessions are shared out over the nodes, and where their vital signs are read."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, Literal

from pydantic import AfterValidator

from controlplane.config.types import File, SettingError, SettingsSection, ValueFormat, section, setting


def _validate_base_url(value: str) -> str:
    if "@" in value:  # not shown: it may hold a password
        raise SettingError(
            "the URL names a user", "leave out what stands before the @, and set bearer_token_file"
        )
    try:
        parts = urllib.parse.urlsplit(value)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.scheme not in ("http", "https"):
        raise SettingError(f"{value!r} is no http:// or https:// URL")
    if parts.query or parts.fragment:
        raise SettingError(f"{value!r} has a query", "write the URL that /api/v1/query stands below")
    return value.rstrip("/")


def _validate_label_name(value: str) -> str:
    # prometheus.io/docs/concepts/data_model
    if not (value.isascii() and value.replace("_", "a").isalnum() and not value[0].isdigit()):
        raise SettingError(f"{value!r} is no name of a label")
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
    """`/metrics` of the status ports of at most 200 nodes, with TLS as `health.status` says."""

    enabled: bool = setting(True, "Whether CPU, memory and health of the nodes are read at all.", "now")
    interval: float = setting(5.0, "Seconds between two readings.", "now", unit="seconds", ge=0.1, le=30)
    timeout: float = setting(
        3.0, "Seconds after which a reading has failed.", "now", unit="seconds", ge=0.05, le=30
    )


class PrometheusSettings(SettingsSection):
    """A Prometheus that scrapes the nodes anyway, asked in their place as often as `balance.metrics` says."""

    url: PrometheusUrl | None = setting(
        None, "Its URL, which /api/v1/query stands below; default: the nodes themselves are asked.", "now"
    )
    labels: dict[LabelName, str] = setting(
        {},
        'Labels that only the series of these nodes have; default: job="tidb", or component="tidb".',
        "now",
    )
    instance_label: LabelName = setting(
        "instance",
        "The label that names the node: by host:port of its status port, by its host, or by the first part of"
        " that (its pod).",
        "now",
    )
    ca: File | None = setting(
        None, "CA bundle (PEM) that its certificate must chain to; default: the system's.", "restart"
    )
    bearer_token_file: File | None = setting(
        None, "A file with a token to send; it is read again each time.", "now"
    )


class BalanceSettings(SettingsSection):
    """How sessions are shared out."""

    policy: Literal["resource", "location", "connection"] = setting(
        "resource",
        "What counts beside connections and weights. resource: health, memory, CPU, then location; location:"
        " location first; connection: nothing, and no metrics are read.",
        "now",
    )
    slow_start: float = setting(
        10.0,
        "Seconds over which a node that joins grows to its full share; 0: at once.",
        "now",
        unit="seconds",
        ge=0,
        le=3600,
    )
    floor: float = setting(
        0.25,
        "When less than this share of the nodes is healthy, checks are distrusted and failed nodes stay in"
        " service.",
        "now",
        ge=0,
        le=1,
    )
    report_interval: float = setting(
        1.0,
        "Seconds between the load reports of an Envoy, and between what its module tells (1 at least, and"
        " only in Envoys with a new bootstrap).",
        "now",
        unit="seconds",
        ge=0.1,
        le=60,
    )
    module_counts: Literal["all", "sessions"] = setting(
        "all",
        "What the module in an Envoy tells of each node: all that it counts or, for fleets of more than 1,000"
        " nodes, sessions and moves alone, which is what decisions rest on.",
        "new envoys",
    )
    metrics: NodeMetricsSettings = section(NodeMetricsSettings, "Vital signs.")
    prometheus: PrometheusSettings = section(PrometheusSettings, "Vital signs from Prometheus.")

    @property
    def needs_node_metrics(self) -> bool:
        """Whether anything is to be read at all."""
        return self.metrics.enabled and self.policy != "connection"
