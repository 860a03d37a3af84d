"""Defaults of TiProxy that differ from those of Tidevoy, in value or effect. The last ones have no key."""

from __future__ import annotations

from cli.importers.report import DefaultDifference

DIFFERENCES = (
    DefaultDifference(
        "proxy.pd-addrs", "127.0.0.1:2379", "pd.urls", "none", "the importer writes TiProxy's default"
    ),
    DefaultDifference(
        "proxy.graceful-close-conn-timeout",
        "15 s",
        "end.timeout",
        "30 s",
        "to keep it: `end.timeout: 15`. Adapt the stop timeout of systemd or Kubernetes"
        " (docs/operate/stop-envoys.md)",
    ),
    DefaultDifference(
        "proxy.failover-timeout",
        "60 s",
        "",
        "sessions are kept",
        "to end the sessions that are left: `tidevoy drain --deadline 60s --on-deadline close`",
    ),
    DefaultDifference(
        "proxy.high-memory-usage-reject-threshold",
        "90 % of the memory",
        "overload.max_heap_bytes",
        "2 GiB of heap",
        "set it to what the machine of an Envoy has for it",
    ),
    DefaultDifference(
        "proxy.frontend-keepalive.enabled",
        "after 15 s, every 15 s",
        "sql.keepalive_idle",
        "after 60 s, every 10 s",
        "to keep it: `sql.keepalive_idle: 15`, `sql.keepalive_interval: 15`, `sql.keepalive_probes: 9`",
    ),
    DefaultDifference(
        "proxy.backend-unhealthy-keepalive.idle",
        "10 s, then 5 probes",
        "backend.health_connections",
        "4 s",
        "a connection of its own detects that a node is unreachable",
    ),
    DefaultDifference(
        "api.addr",
        "0.0.0.0:3080",
        "api.listen",
        "127.0.0.1:3080",
        "other machines, such as Prometheus, need `api.tls` and `api.tokens` (docs/operate/security.md)",
    ),
    DefaultDifference("log.encoder", "tidb", "log.format", "auto", "JSON, or text on a terminal"),
    DefaultDifference(
        "balance.policy",
        "resource",
        "balance.policy",
        "resource",
        "the same factors in the same order, but each reduces the share of a node"
        " (docs/concepts/balancing.md)",
    ),
    DefaultDifference(
        "balance.conn-count.count-ratio-threshold",
        "1.2",
        "rebalance.threshold",
        "0.05",
        "to keep it: `rebalance.threshold: 0.091`",
    ),
    DefaultDifference(
        "balance.status.migrations-per-second",
        "all sessions within 5 s",
        "migration.max_per_second",
        "500 for each Envoy",
        "",
    ),
    DefaultDifference(
        "balance.conn-count.migrations-per-second",
        "depends on the difference",
        "rebalance.max_per_second",
        "200 for all Envoys",
        "",
    ),
    DefaultDifference(
        "(compression)",
        "offered to clients",
        "sql.compression",
        "off",
        "most clients then continue without it; compressed sessions would not migrate",
    ),
    DefaultDifference(
        "(health checks)",
        "every 3 s, 4 attempts",
        "health.status, health.sql",
        "every 1 s, 3 failures",
        "",
    ),
    DefaultDifference(
        "(wait for a backend)",
        "up to 15 s",
        "sql.wait_for_node",
        "5 s",
        "time for which a new client waits while no node can serve it",
    ),
)
