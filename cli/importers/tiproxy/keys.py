"""All keys of TiProxy's configuration file, and how each is converted.

Source: `lib/config` and `conf/proxy.toml` of TiProxy's main branch, the metering SDK that it uses, and their
history for keys that were removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from cli.importers.key_rules import (
    STOP_TIME_NOTE,
    KeyRule,
    ValueKind,
    index_rules,
    mapped,
    needless,
    no_equivalent,
)

_TEXT, _INTEGER, _NUMBER = ValueKind.TEXT, ValueKind.INTEGER, ValueKind.NUMBER
_BOOLEAN, _DURATION, _TEXTS = ValueKind.BOOLEAN, ValueKind.DURATION, ValueKind.TEXTS

_GENERATED = "Tidevoy generates no certificates for these ports: create one, and set the two files"
_RATE_OF_FLEET = (
    "the rate of one TiProxy; Tidevoy's is for all Envoys together. The highest rate of these keys counts"
)
_METERING = "Tidevoy does not meter traffic; `tidevoy_bytes_total` counts the bytes of each node"
_CAPTURES_ARE_PLAIN = "captures of traffic (`capture.directory`) are not encrypted: use an encrypted disk"
_KEEPALIVED = "Envoys have no virtual address of their own: use keepalived (docs/operate/virtual-ip.md)"

_PROXY = (
    mapped(
        "proxy.addr",
        to="sql.listen",
        kind=_TEXT,
        note="of several addresses, the first one. With `balance.routing-rule` = `port`, each further port"
        " becomes a group",
    ),
    mapped(
        "proxy.port-range",
        to="sql.listen, groups",
        kind=ValueKind.INTEGERS,
        note="the first port is that of `sql.listen`. With `balance.routing-rule` = `port`, each further port"
        " becomes a group; otherwise there is no equivalent, since two ports cannot lead to the same nodes",
    ),
    needless("proxy.advertise-addr", kind=_TEXT, note="Envoys do not register in PD"),
    mapped(
        "proxy.pd-addrs",
        to="pd.urls",
        kind=_TEXT,
        note="https if `security.cluster-tls` turns TLS on. An empty value means nodes without PD: list them"
        " in `nodes`",
    ),
    mapped(
        "proxy.max-connections",
        to="sql.max_connections",
        kind=_INTEGER,
        note="both count the clients of one proxy. Clients over the limit get error 1040 instead of a closed"
        " connection",
    ),
    no_equivalent(
        "proxy.high-memory-usage-reject-threshold",
        kind=_NUMBER,
        note="set `overload.max_heap_bytes`, the heap in bytes at which an Envoy accepts no more clients",
    ),
    needless(
        "proxy.conn-buffer-size",
        kind=_INTEGER,
        note="the module forwards from socket to socket without a buffer for each connection",
    ),
    no_equivalent(
        "proxy.frontend-keepalive.enabled",
        kind=_BOOLEAN,
        note="Tidevoy always probes clients by TCP keepalive (`sql.keepalive_idle`, `keepalive_interval`,"
        " `keepalive_probes`)",
    ),
    *(
        needless(
            f"proxy.frontend-keepalive.{name}",
            kind=kind,
            note=f"TiProxy ignores it; Tidevoy has {setting}",
        )
        for name, kind, setting in (
            ("idle", _DURATION, "`sql.keepalive_idle`"),
            ("cnt", _INTEGER, "`sql.keepalive_probes`"),
            ("intvl", _DURATION, "`sql.keepalive_interval`"),
            ("timeout", _DURATION, "no such setting"),
        )
    ),
    no_equivalent(
        "proxy.backend-healthy-keepalive.enabled",
        kind=_BOOLEAN,
        note="Tidevoy always probes nodes by TCP keepalive",
    ),
    mapped(
        "proxy.backend-healthy-keepalive.idle",
        to="backend.keepalive_idle",
        kind=_DURATION,
        note="in whole seconds, at least 1",
    ),
    mapped("proxy.backend-healthy-keepalive.cnt", to="backend.keepalive_probes", kind=_INTEGER),
    mapped(
        "proxy.backend-healthy-keepalive.intvl",
        to="backend.keepalive_interval",
        kind=_DURATION,
        note="in whole seconds, at least 1",
    ),
    needless(
        "proxy.backend-healthy-keepalive.timeout",
        kind=_DURATION,
        note="an Envoy detects within 4 s that a node is unreachable, also while a client waits for its"
        " answer (docs/concepts/unreachable-nodes.md)",
    ),
    *(
        needless(
            f"proxy.backend-unhealthy-keepalive.{name}",
            kind=kind,
            note="an Envoy detects within 4 s that a node is unreachable, whether its checks fail or not",
        )
        for name, kind in (
            ("enabled", _BOOLEAN),
            ("idle", _DURATION),
            ("cnt", _INTEGER),
            ("intvl", _DURATION),
            ("timeout", _DURATION),
        )
    ),
    mapped(
        "proxy.proxy-protocol",
        to="sql.proxy_protocol, sql.trusted_proxies, backend.proxy_protocol",
        kind=_TEXT,
        note="TiProxy reads a PROXY header from any client; Tidevoy only from `sql.trusted_proxies`, which"
        " you have to list",
    ),
    mapped("proxy.graceful-wait-before-shutdown", to="end.wait", kind=_INTEGER),
    mapped(
        "proxy.graceful-close-conn-timeout",
        to="end.timeout",
        kind=_INTEGER,
        note=f"0 closes all connections at once in both; {STOP_TIME_NOTE}",
    ),
    no_equivalent("proxy.public-endpoints", kind=_TEXTS, note=_METERING),
    needless("proxy.backend-clusters[].name", kind=_TEXT, note="one Tidevoy serves one cluster"),
    mapped(
        "proxy.backend-clusters[].pd-addrs",
        to="pd.urls",
        kind=_TEXT,
        note="of several clusters, the first one, or that of `--cluster`: one Tidevoy serves one cluster"
        " (docs/internals/decisions/0021-one-tidb-cluster.md)",
    ),
    no_equivalent(
        "proxy.backend-clusters[].ns-servers",
        kind=_TEXTS,
        note="Tidevoy uses the name servers of its machine (`/etc/resolv.conf`)",
    ),
    no_equivalent(
        "proxy.fail-backend-list",
        kind=_TEXTS,
        note="drain the nodes: `tidevoy drain ADDRESS --deadline 60s --on-deadline close`",
    ),
    no_equivalent(
        "proxy.failover-timeout",
        kind=_INTEGER,
        note="each drain has its own: `tidevoy drain --deadline SECONDS --on-deadline close`",
    ),
)

_API = (
    mapped(
        "api.addr",
        to="api.listen",
        kind=_TEXT,
        note="TiProxy's API has no authentication. Tidevoy listens on addresses other than loopback only with"
        " `api.tls`, and `api.tokens` or `api.clients`; without them, only the port is kept",
    ),
    no_equivalent(
        "api.proxy-protocol",
        kind=_TEXT,
        note="the REST server reads no PROXY headers; of HTTP proxies it reads `X-Forwarded-For`"
        " (`api.trusted_proxies`)",
    ),
)

_TLS_KINDS = {
    "cert": _TEXT,
    "key": _TEXT,
    "ca": _TEXT,
    "min-tls-version": _TEXT,
    "cert-allowed-cn": _TEXTS,
    "auto-certs": _BOOLEAN,
    "rsa-key-size": _INTEGER,
    "autocert-expire-duration": _TEXT,
    "skip-ca": _BOOLEAN,
}


def _tls(section: str, name: str, **outcome: str) -> KeyRule:
    """Return the rule of a key of a TLS section; `to` in `outcome` makes it a mapped one."""
    key, kind = f"security.{section}.{name}", _TLS_KINDS[name]
    if "to" in outcome:
        return mapped(key, kind=kind, **outcome)
    if "why" in outcome:
        return needless(key, kind=kind, note=outcome["why"])
    return no_equivalent(key, kind=kind, note=outcome["instead"])


_CLIENT_OBJECT = "TiProxy ignores it where it is the client"
_WITHOUT_GENERATION = "Tidevoy generates no certificates for these ports"

_SECURITY = (
    _tls("server-tls", "cert", to="tls.client.cert", note="with `tls.client.mode: optional`"),
    _tls("server-tls", "key", to="tls.client.key"),
    _tls("server-tls", "ca", to="tls.client.client_ca", note="clients need a certificate of this CA"),
    _tls("server-tls", "min-tls-version", to="tls.client.min_version", note="1.2 or 1.3"),
    _tls(
        "server-tls",
        "cert-allowed-cn",
        instead="the names of clients' certificates are not checked: use a CA that issues certificates only"
        " to these clients",
    ),
    _tls("server-tls", "auto-certs", instead=_GENERATED),
    _tls("server-tls", "rsa-key-size", why=_WITHOUT_GENERATION),
    _tls("server-tls", "autocert-expire-duration", why=_WITHOUT_GENERATION),
    _tls(
        "server-tls",
        "skip-ca",
        instead="a CA for clients means that each client with TLS needs a certificate; without this,"
        " `tls.client.client_ca` is not set",
    ),
    _tls(
        "server-http-tls",
        "cert",
        to="api.tls.cert",
        note="a file on the machine of the control plane",
    ),
    _tls("server-http-tls", "key", to="api.tls.key"),
    _tls(
        "server-http-tls",
        "ca",
        to="api.tls.client_ca",
        note="only with `cert-allowed-cn`, because Tidevoy authorizes callers by name",
    ),
    _tls("server-http-tls", "min-tls-version", why="the REST server requires TLS 1.2 or later"),
    _tls(
        "server-http-tls",
        "cert-allowed-cn",
        to="api.clients",
        note="with the role `operator`. Tidevoy compares the alternative names of a certificate, and its"
        " common name only if it has no others",
    ),
    _tls("server-http-tls", "auto-certs", instead=_GENERATED),
    _tls("server-http-tls", "rsa-key-size", why=_WITHOUT_GENERATION),
    _tls("server-http-tls", "autocert-expire-duration", why=_WITHOUT_GENERATION),
    _tls(
        "server-http-tls",
        "skip-ca",
        instead="callers without a certificate need a token (`tidevoy token create`)",
    ),
    _tls(
        "cluster-tls",
        "cert",
        to="pd.tls.cert, health.status.client_tls.cert",
        note="only with a CA, as in TiProxy",
    ),
    _tls("cluster-tls", "key", to="pd.tls.key, health.status.client_tls.key"),
    _tls(
        "cluster-tls",
        "ca",
        to="pd.tls.ca, health.status.client_tls.ca",
        note="turns on `health.status.tls` too. Unlike TiProxy, Tidevoy also checks that certificates have"
        " the name of the server",
    ),
    _tls("cluster-tls", "min-tls-version", why="Tidevoy requires TLS 1.2 or later"),
    _tls("cluster-tls", "cert-allowed-cn", why=_CLIENT_OBJECT),
    _tls("cluster-tls", "auto-certs", why=_CLIENT_OBJECT),
    _tls("cluster-tls", "rsa-key-size", why=_CLIENT_OBJECT),
    _tls("cluster-tls", "autocert-expire-duration", why=_CLIENT_OBJECT),
    _tls(
        "cluster-tls",
        "skip-ca",
        instead="Tidevoy always verifies the certificates of PD and of status ports: set `pd.tls.ca` and"
        " `health.status.client_tls.ca`",
    ),
    _tls("sql-tls", "cert", to="tls.backend.cert", note="only with a CA, as in TiProxy"),
    _tls("sql-tls", "key", to="tls.backend.key"),
    _tls(
        "sql-tls",
        "ca",
        to="tls.backend.ca",
        note="with `tls.backend.mode: preferred` and, as in TiProxy, `verify: ca`. `full` checks names too",
    ),
    _tls("sql-tls", "min-tls-version", to="tls.backend.min_version", note="1.2 or 1.3"),
    _tls("sql-tls", "cert-allowed-cn", why=_CLIENT_OBJECT),
    _tls("sql-tls", "auto-certs", why=_CLIENT_OBJECT),
    _tls("sql-tls", "rsa-key-size", why=_CLIENT_OBJECT),
    _tls("sql-tls", "autocert-expire-duration", why=_CLIENT_OBJECT),
    _tls(
        "sql-tls",
        "skip-ca",
        to="tls.backend.verify",
        note="`none`, with `tls.backend.mode: preferred`. Without effect if there is a CA, as in TiProxy",
    ),
    no_equivalent("security.encryption-key-path", kind=_TEXT, note=_CAPTURES_ARE_PLAIN),
    mapped("security.require-backend-tls", to="tls.backend.mode", kind=_BOOLEAN, note="true is `required`"),
)

_LOG = (
    mapped("log.level", to="log.level", kind=_TEXT, note="levels above `error` become `error`"),
    mapped(
        "log.encoder",
        to="log.format",
        kind=_TEXT,
        note="`json` and `console`; `tidb` becomes `auto`. It formats the log of the control plane; Envoy has"
        " its own (`--log-format`)",
    ),
    needless("log.simple", kind=_BOOLEAN, note="it is for TiProxy's replayer"),
    no_equivalent(
        "log.log-file.filename",
        kind=_TEXT,
        note="Tidevoy logs to standard error: read it with `journalctl`, or redirect it",
    ),
    *(
        needless(f"log.log-file.{name}", kind=_INTEGER, note="journald or logrotate rotates logs")
        for name in ("max-size", "max-days", "max-backups")
    ),
)

_BALANCE = (
    mapped("balance.policy", to="balance.policy", kind=_TEXT, note="the same names and factors"),
    needless(
        "balance.routing-policy",
        kind=_TEXT,
        note="the control plane gives each node a weight, which already prefers nodes with fewer sessions",
    ),
    mapped(
        "balance.label-name",
        to="groups",
        kind=_TEXT,
        note="a group of the nodes whose label has the value that `labels` gives to TiProxy. Start the Envoys"
        " that replace this TiProxy with `tidevoy bootstrap --group NAME`",
    ),
    mapped(
        "balance.routing-rule",
        to="groups",
        kind=_TEXT,
        note="`port`: a group by the label `tiproxy-port` for each port but the first. `client_cidr` and"
        " `proxy_cidr` have no equivalent: give each set of nodes its own port (`groups`)",
    ),
    mapped(
        "balance.status.migrations-per-second",
        to="migration.max_per_second",
        kind=_NUMBER,
        note="Tidevoy's limit is for all migrations of an Envoy, whatever their cause",
    ),
    *(
        mapped(
            f"balance.{factor}.migrations-per-second",
            to="rebalance.max_per_second",
            kind=_NUMBER,
            note=_RATE_OF_FLEET,
        )
        for factor in ("health", "memory", "cpu", "location", "conn-count")
    ),
    mapped(
        "balance.conn-count.count-ratio-threshold",
        to="rebalance.threshold",
        kind=_NUMBER,
        note="(ratio - 1) / (ratio + 1): with two nodes, sessions then begin to move at the same difference",
    ),
)

_OTHER = (
    needless("workdir", kind=_TEXT, note="Tidevoy has a directory of its own, `state_dir`"),
    mapped(
        "labels.zone",
        to="tidevoy bootstrap --zone",
        kind=_TEXT,
        note="an option of each Envoy; `tidevoy serve --with-envoy` has `--envoy-zone`",
    ),
    needless(
        "labels.*",
        kind=_TEXT,
        note="only the labels `zone` and that of `balance.label-name` have an effect",
    ),
    no_equivalent("ha.virtual-ip", "ha.interface", kind=_TEXT, note=_KEEPALIVED),
    no_equivalent("ha.garp-burst-count", "ha.garp-refresh-count", kind=_INTEGER, note=_KEEPALIVED),
    no_equivalent(
        *(f"metering.{name}" for name in ("type", "region", "bucket", "prefix", "endpoint")),
        "metering.shared-pool-id",
        *(f"metering.aws.{name}" for name in ("assume-role-arn", "s3-force-path-style")),
        *(f"metering.aws.{name}" for name in ("access-key", "secret-access-key", "session-token")),
        *(f"metering.oss.{name}" for name in ("assume-role-arn", "access-key")),
        *(f"metering.oss.{name}" for name in ("secret-access-key", "session-token")),
        *(f"metering.azure.{name}" for name in ("account-name", "account-key", "sas-token")),
        *(f"metering.localfs.{name}" for name in ("base-path", "create-dirs", "permissions")),
        note=_METERING,
    ),
    no_equivalent(
        "enable-traffic-replay", kind=_BOOLEAN, note="set `capture.directory` for `tidevoy traffic capture`"
    ),
)

_REMOVED = (
    needless("proxy.tcp-keep-alive", note="Tidevoy always probes by TCP keepalive"),
    needless("proxy.server-version", note="clients see the version of the node to which they connect"),
    mapped("proxy.require-backend-tls", to="tls.backend.mode", kind=_BOOLEAN, note="true is `required`"),
    no_equivalent("proxy.backend-keepalive.enabled", note="Tidevoy always probes nodes by TCP keepalive"),
    mapped("proxy.backend-keepalive.idle", to="backend.keepalive_idle", kind=_DURATION),
    mapped("proxy.backend-keepalive.cnt", to="backend.keepalive_probes", kind=_INTEGER),
    mapped("proxy.backend-keepalive.intvl", to="backend.keepalive_interval", kind=_DURATION),
    no_equivalent(
        "api.enable-basic-auth",
        "api.user",
        "api.password",
        note="callers authenticate by tokens (`tidevoy token create`) or certificates",
    ),
    needless(
        "advance.ignore-wrong-namespace",
        "advance.peer-port",
        "advance.watch-interval",
        note="Tidevoy has no namespaces",
    ),
    needless(
        "metrics.metrics-addr",
        "metrics.metrics-interval",
        "metrics.prom-cluster",
        note="Prometheus reads `/metrics` of the control planes; nothing is pushed",
    ),
    needless(
        *(f"security.peer-tls.{name}" for name in _TLS_KINDS if name != "cert-allowed-cn"),
        *(f"security.{side}.{name}" for side in ("cluster", "server") for name in ("ca", "cert", "key")),
        "security.rsa-key-size",
        note="current releases of TiProxy ignore it",
    ),
    no_equivalent("security.encryption.key-path", note=_CAPTURES_ARE_PLAIN),
    needless(
        *(f"balance.{name}.enable" for name in ("cpu", "error", "label", "location", "memory")),
        note="`balance.policy` selects the factors",
    ),
    mapped("balance.label.label-name", to="groups", kind=_TEXT, note="as `balance.label-name`"),
    needless("balance.location.location-first", note="`balance.policy: location` has this effect"),
    needless("balance.route-policy", note="as `balance.routing-policy`"),
    no_equivalent("metering.role-arn", note=_METERING),
)

SECTIONS: Mapping[str, tuple[KeyRule, ...]] = {
    "`proxy`": _PROXY,
    "`api`": _API,
    "`security`": _SECURITY,
    "`log`": _LOG,
    "`balance`": _BALANCE,
    "Other keys": _OTHER,
    "Keys of earlier releases": _REMOVED,
}

RULES = index_rules(rule for rules in SECTIONS.values() for rule in rules)
