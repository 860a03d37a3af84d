"""The metrics and alerts of TiProxy, and which of Tidevoy's mean the same.

Source: `pkg/metrics` of TiProxy's main branch. The recording rules are in
`deploy/prometheus/rules/tiproxy-names.yml`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricMatch:
    """A metric of TiProxy. `has_rule`: a recording rule gives its name to `tidevoy`.

    Without a rule, `tidevoy` is empty, or names metrics that mean something similar.
    """

    name: str
    tidevoy: str
    remark: str
    has_rule: bool = False


@dataclass(frozen=True, slots=True)
class AlertMatch:
    """An alert of TiProxy, and the alerts of Tidevoy that report the same problem."""

    name: str
    tidevoy: tuple[str, ...]
    remark: str


def _same(name: str, tidevoy: str, remark: str) -> MetricMatch:
    return MetricMatch(name, tidevoy, remark, has_rule=True)


METRICS = (
    _same(
        "tiproxy_server_connections",
        "tidevoy_envoy_sessions",
        "without clients for which no node is chosen yet",
    ),
    MetricMatch(
        "tiproxy_server_create_connection_total",
        "tidevoy_logins_total",
        "only successful logins; connections that do not log in are not counted",
    ),
    _same(
        "tiproxy_server_reject_connection_total",
        'tidevoy_login_failures_total{reason="too_many_connections"}',
        'only `type="max_connections"`',
    ),
    MetricMatch("tiproxy_server_disconnection_total", "", "see `sql.access_log`"),
    MetricMatch("tiproxy_server_maxprocs", "", "Envoy's option `--concurrency`"),
    MetricMatch("tiproxy_server_owner", "tidevoy_leader", "Tidevoy has one leader for all decisions"),
    MetricMatch("tiproxy_server_event", "tidevoy_envoy_connected", "1 while an Envoy runs"),
    MetricMatch(
        "tiproxy_server_err", "tidevoy_source_up, tidevoy_envoy_nacks_total", "one metric for each problem"
    ),
    MetricMatch(
        "tiproxy_monitor_time_jump_back_total",
        "",
        "see the runbook (docs/operate/runbooks/clock-jump.md)",
    ),
    MetricMatch("tiproxy_monitor_keep_alive_total", "up", "Prometheus sets it for each target"),
    _same(
        "tiproxy_session_query_total",
        "tidevoy_commands_total",
        "`cmd_type` as in TiProxy; the rest is `Other`",
    ),
    _same(
        "tiproxy_session_query_duration_seconds",
        "tidevoy_command_seconds",
        "from the command to the end of its response, without `cmd_type` and with other buckets",
    ),
    MetricMatch("tiproxy_session_handshake_duration_seconds", "", "see `sql.login_log`"),
    MetricMatch("tiproxy_session_query_time_since_conn_creation_seconds", "", ""),
    MetricMatch("tiproxy_session_conn_lifetime_seconds", "", "`duration_ms` in `sql.access_log`"),
    MetricMatch(
        "tiproxy_backend_b_status",
        "tidevoy_node_in_service",
        "0 also for a node that is drained, and not for each Envoy",
    ),
    MetricMatch("tiproxy_backend_get_backend_duration_seconds", "", "see `sql.login_log`"),
    _same(
        "tiproxy_backend_get_backend",
        'tidevoy_login_failures_total{reason="no_node"}',
        'only `res="fail"`',
    ),
    _same(
        "tiproxy_backend_dial_backend_fail",
        'tidevoy_connect_failures_total{reason="connect"}',
        "the other reasons are failures after the TCP connection",
    ),
    MetricMatch("tiproxy_backend_ping_duration_seconds", "", ""),
    MetricMatch("tiproxy_backend_health_check_seconds", "", "each node is checked on its own"),
    MetricMatch(
        "tiproxy_backend_backend_metric",
        "tidevoy_node_cpu_ratio, tidevoy_node_memory_ratio",
        "and `tidevoy_node_pd_failure_ratio`, `tidevoy_node_tikv_failure_ratio`",
    ),
    _same("tiproxy_balance_b_conn", "tidevoy_sessions", "without sessions that are logging in"),
    MetricMatch(
        "tiproxy_balance_b_score",
        "tidevoy_node_factor_share",
        "a factor from 0 to 1 for the node's share, not a score",
    ),
    MetricMatch(
        "tiproxy_balance_pending_migrate",
        "tidevoy_node_rebalance_sessions",
        "only sessions that rebalancing moves in this round",
    ),
    _same(
        "tiproxy_balance_migrate_total",
        "tidevoy_migrations_total",
        "without `to`, and without `reason`: Tidevoy knows the node that a session leaves",
    ),
    MetricMatch(
        "tiproxy_balance_migrate_duration_seconds",
        "tidevoy_migration_duration_seconds",
        "only successful migrations, without the time before they start",
    ),
    _same("tiproxy_traffic_inbound_bytes", 'tidevoy_bytes_total{direction="to_client"}', "bytes from nodes"),
    MetricMatch("tiproxy_traffic_inbound_packets", "", ""),
    _same("tiproxy_traffic_outbound_bytes", 'tidevoy_bytes_total{direction="to_node"}', "bytes to nodes"),
    MetricMatch("tiproxy_traffic_outbound_packets", "", ""),
    MetricMatch("tiproxy_traffic_cross_location_bytes", "", "`tidevoy_bytes_total` by Envoy and node"),
    MetricMatch("tiproxy_replay_pending_cmds", "", "`tidevoy traffic replay` prints its progress"),
    MetricMatch("tiproxy_replay_wait_time", "", "`tidevoy traffic replay` prints its progress"),
)

ALERTS = (
    AlertMatch(
        "TiProxyServerIsDown",
        ("TidevoyEnvoyDisconnected", "TidevoyControlPlaneDown"),
        'its expression is `up{job="tiproxy"}`, which no rule can provide',
    ),
    AlertMatch("TiProxyDiscoveredTimeJumpBack", (), "see the runbook (docs/operate/runbooks/clock-jump.md)"),
    AlertMatch(
        "TiProxyReportErr",
        ("TidevoyPdOutage", "TidevoyEnvoyNack", "TidevoyNodeMetricsOutage", "TidevoyCertificatesRejected"),
        "one alert for each kind of error",
    ),
    AlertMatch(
        "TiProxyGetBackendFail",
        ("TidevoyNoNodeInService", "TidevoyConnectionsFail"),
        "TiProxy's own alert also works, with the recording rule of its metric",
    ),
)
