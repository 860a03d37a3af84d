"""The keywords of HAProxy's configuration in TCP mode, and how each is converted.

Source: sections 3, 4, 11 and 12 of HAProxy's configuration manual, and keywords of earlier releases. A key
that ends in `*` stands for all keywords that begin like it. The options of `bind` and `server` are in
`haproxy_options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cli.importers.key_rules import STOP_TIME_NOTE, KeyRule, index_rules, mapped, needless, no_equivalent
from cli.importers.report import DefaultDifference

_HTTP = "it is for HTTP"
_UNIT = "the systemd unit or the container of the Envoy decides (deploy/systemd)"
_SESSION_LOG = "set `sql.access_log` for one line per session, and `sql.login_log` for one per login"
_PORT_GROUPS = "Tidevoy chooses by port: write a group of nodes for each set of servers (`groups`)"

_GLOBAL = (
    mapped(
        "maxconn",
        to="sql.max_connections",
        note="the lower one of this and that of the proxy. Clients over the limit get error 1040 at once;"
        " HAProxy lets them wait",
    ),
    mapped("hard-stop-after", to="end.timeout", note=STOP_TIME_NOTE),
    mapped("grace", to="end.wait"),
    mapped(
        "maxconnrate",
        "maxsessrate",
        to="limits.max_new_connections_per_second",
        note="the lowest one, also of `rate-limit sessions`. Tidevoy's limit is for all Envoys together, and"
        " clients over it get error 1040; HAProxy lets them wait",
    ),
    mapped(
        "ssl-default-bind-options",
        to="tls.client.min_version",
        note="only `ssl-min-ver`, and only if the proxy has `bind ... ssl`",
    ),
    mapped(
        "ssl-default-server-options",
        to="tls.backend.min_version",
        note="only `ssl-min-ver`, and only if the proxy has `server ... ssl`",
    ),
    needless("ca-base", "crt-base", "key-base", note="the importer completes relative paths with it"),
    needless(
        *("setenv", "presetenv", "unsetenv", "resetenv"),
        note="the importer applies it to the lines that follow",
    ),
    needless(
        *("nbthread", "nbproc", "cpu-map", "cpu-affinity", "cpu-policy", "cpu-set", "numa-cpu-mapping"),
        *("thread-group", "thread-groups", "max-threads-per-group"),
        note="Envoy starts one worker for each CPU; its option `--concurrency` sets another number",
    ),
    needless(
        *("user", "group", "uid", "gid", "chroot", "daemon", "pidfile", "set-dumpable", "unix-bind"),
        *("insecure-fork-wanted", "insecure-setuid-wanted", "master-worker", "mworker-max-reloads"),
        note=_UNIT,
    ),
    needless(
        *("ulimit-n", "fd-hard-limit", "strict-limits", "prealloc-fd"),
        note="Tidevoy's supervisor raises the limit of open files",
    ),
    no_equivalent("log", note=_SESSION_LOG),
    needless("log-send-hostname", "log-tag", note="the logs of Tidevoy have no syslog header"),
    needless("stats", "stats-file", note="the console, `tidevoy` and `/metrics` show the same"),
    no_equivalent(
        *("ssl-default-bind-ciphers", "ssl-default-bind-ciphersuites", "ssl-default-bind-curves"),
        *("ssl-default-bind-sigalgs", "ssl-default-bind-client-sigalgs", "ssl-default-server-ciphers"),
        *("ssl-default-server-ciphersuites", "ssl-default-server-curves", "ssl-default-server-sigalgs"),
        *("ssl-default-server-client-sigalgs", "ssl-dh-param-file", "ssl-engine", "ssl-propquery"),
        *("ssl-provider", "ssl-provider-path", "ssl-security-level"),
        note="the module uses modern ciphers of TLS 1.2 and 1.3, which cannot be changed",
    ),
    no_equivalent(
        "ssl-server-verify", note="`tls.backend.verify` decides whether nodes' certificates are verified"
    ),
    needless(
        *("ssl-load-extra-files", "ssl-load-extra-del-ext", "ssl-skip-self-issued-ca"),
        *("ssl-mode-async", "issuers-chain-path", "maxsslconn", "maxsslrate"),
        note="Tidevoy has no such mode of TLS",
    ),
    no_equivalent("lua-*", note="Tidevoy runs no scripts"),
    no_equivalent("external-check", note="`health.statement` can run any SQL statement as a check"),
    needless(
        *("tune.*", "noepoll", "noevports", "nogetaddrinfo", "nokqueue", "noktls", "nopoll"),
        *("noreuseport", "nosplice", "busy-polling", "no-memory-trimming", "profiling.*", "maxpipes"),
        note="Envoy needs no such tuning",
    ),
    needless(
        *("spread-checks", "max-spread-checks"),
        note="Tidevoy's checks of different nodes are independent",
    ),
    needless(
        *("51degrees-*", "deviceatlas-*", "wurfl-*", "h1-*", "h2-*", "http*", "jwt.*", "ocsp-update.*"),
        *("maxcomp*", "maxzlibmem", "limited-quic", "harden.*"),
        note=_HTTP,
    ),
    needless(
        *("description", "node", "localpeer", "cluster-secret", "server-state-base", "server-state-file"),
        *("default-path", "set-var", "set-var-fmt", "expose-deprecated-directives", "dns-accept-family"),
        *("expose-experimental-directives", "close-spread-time", "pp2-never-send-local", "quiet", "debug"),
        *("zero-warning", "anonkey", "debug.counters", "force-cfg-parser-pause", "warn-blocked-*"),
        note="Tidevoy needs nothing of this kind",
    ),
)

_IDLE = (
    "the shorter one of `timeout client` and `timeout server`, or `timeout tunnel` if it is set. Unlike in"
    " HAProxy, a session that waits for an answer is not idle"
)
_TRACKING = "limit connections by user and network with `limits.rules`; block clients in a firewall"

_PROXY = (
    mapped("bind", to="sql.listen", note="of several addresses, the first one"),
    mapped("maxconn", to="sql.max_connections", note="see `global`"),
    mapped(
        "timeout connect",
        to="backend.connect_timeout",
        note="it also includes the greeting of the node",
    ),
    mapped("timeout client", "timeout server", "timeout tunnel", to="sql.idle_timeout", note=_IDLE),
    mapped("timeout check", to="health.sql.timeout", note="also for the other checks that are imported"),
    mapped(
        "balance",
        to="balance.policy",
        note="`leastconn`, `roundrobin`, `static-rr` and `random` become `connection`: sessions are balanced"
        " by their number and the weights. `resource`, Tidevoy's default, also uses the nodes' health, memory"
        " and CPU. Algorithms that bind a client to a server have no equivalent",
    ),
    mapped(
        "retries",
        to="backend.max_connect_attempts",
        note="plus one, since it counts the attempts. Each attempt goes to another node",
    ),
    mapped(
        "option mysql-check",
        to="health.statement.user",
        note="with `health.statement.enabled: true`. Tidevoy also runs `SELECT 1`. Without a user, only"
        " `health.sql` is used, which reads the greeting",
    ),
    mapped(
        "option httpchk",
        to="health.status.enabled",
        note="Tidevoy requests `/status`. `port` of a server becomes the port of its `status_address`",
    ),
    needless("option tcp-check", note="`health.sql` connects, and expects the greeting of MySQL"),
    mapped(
        "clitcpka-idle",
        to="sql.keepalive_idle",
    ),
    mapped("clitcpka-intvl", to="sql.keepalive_interval"),
    mapped("clitcpka-cnt", to="sql.keepalive_probes"),
    mapped("srvtcpka-idle", to="backend.keepalive_idle"),
    mapped("srvtcpka-intvl", to="backend.keepalive_interval"),
    mapped("srvtcpka-cnt", to="backend.keepalive_probes"),
    needless("option tcpka", "option clitcpka", "option srvtcpka", note="keepalive is always on"),
    mapped("rate-limit sessions", to="limits.max_new_connections_per_second", note="see `global`"),
    mapped(
        "tcp-request connection",
        to="sql.proxy_protocol, sql.trusted_proxies",
        note="`expect-proxy layer4 if { src NETWORK }` becomes `optional`. Other rules have no equivalent: "
        + _TRACKING,
    ),
    mapped("server", to="nodes", note="TiDB servers that register in PD are found without it (`pd.urls`)"),
    mapped("default-server", to="nodes", note="its options apply to the servers that follow"),
    needless("default_backend", note="it names the servers, which are imported"),
    needless("mode", note="Tidevoy speaks MySQL on all of its ports"),
    needless("option redispatch", note="each attempt goes to another node"),
    needless("option allbackups", note="all backup nodes serve when no other node does"),
    no_equivalent(
        "timeout queue",
        "fullconn",
        note="nothing waits for a free slot of a server: a client goes on to a node that has room",
    ),
    needless(
        *("timeout client-fin", "timeout server-fin", "timeout client-hs"),
        note="an Envoy closes both sides of a session together; `sql.login_timeout` limits logins",
    ),
    no_equivalent("acl", "use_backend", "force-be-switch", note=_PORT_GROUPS),
    no_equivalent("use-server", "force-persist", "ignore-persist", note=_PORT_GROUPS),
    no_equivalent(
        *("stick", "stick-table", "persist", "option persist", "hash-type", "hash-balance-factor"),
        *("hash-preserve-affinity", "cookie", "appsession"),
        note="any node may serve any client, and sessions move between nodes",
    ),
    no_equivalent("tcp-request", "tcp-response", note=_TRACKING),
    no_equivalent("tcp-check", note="`health.statement` can run any SQL statement as a check"),
    no_equivalent(
        *("option external-check", "external-check", "option ldap-check", "option pgsql-check"),
        *("option redis-check", "option smtpchk", "option spop-check", "option ssl-hello-chk"),
        note="`health.sql` reads the greeting; `health.statement` can run any SQL statement",
    ),
    no_equivalent("server-template", note="list the nodes, or let Tidevoy find them in PD (`pd.urls`)"),
    no_equivalent("dispatch", "option transparent", "transparent", note="list the servers in `nodes`"),
    no_equivalent("source", note="the system chooses the address from which Envoys connect to nodes"),
    no_equivalent(
        *("log", "option tcplog", "log-format", "log-format-sd", "error-log-format", "option logasap"),
        *("option dontlog-normal", "option log-separate-errors", "log-steps"),
        note=_SESSION_LOG,
    ),
    needless("log-tag", "option dontlognull", note="the logs of Tidevoy have no such lines"),
    needless("option log-health-checks", note="`tidevoy events` shows each change of a node"),
    no_equivalent("email-alert", note="use the alerts of Prometheus (deploy/prometheus)"),
    needless(
        *("stats", "option socket-stats", "option contstats"),
        note="the console, `tidevoy` and `/metrics` show the same",
    ),
    needless(
        *("load-server-state-from-file", "server-state-file-name"),
        note="control planes save the state of nodes by themselves (`state_dir`)",
    ),
    needless(
        *("description", "id", "guid", "enabled", "disabled", "be-unpublished"),
        note="it names the proxy, or switches it on and off",
    ),
    needless(
        *("backlog", "option splice-auto", "option splice-request", "option splice-response"),
        *("option tcp-smart-accept", "option tcp-smart-connect", "option nolinger"),
        *("option independent-streams", "option use-small-buffers", "bind-process"),
        note="Envoy needs no such tuning",
    ),
    no_equivalent("option abortonclose", note="a login of a client that has gone ends by itself"),
    no_equivalent("monitor-net", note="load balancers check `envoy_health.listen`"),
    no_equivalent("filter", "filter-sequence", "declare", note="Tidevoy has no such filters"),
    no_equivalent("crt", note="see `bind ... crt`"),
    needless(
        *("http-*", "http-check", "compression", "errorfile", "errorfiles", "errorloc*", "redirect"),
        *("monitor", "monitor-uri", "unique-id-format", "unique-id-header", "use-fcgi-app", "capture"),
        *("retry-on", "max-keep-alive-queue", "max-session-srv-conns", "quic-initial"),
        *("timeout http-keep-alive", "timeout http-request", "timeout tarpit", "timeout mail"),
        *("option accept-*", "option checkcache", "option disable-h2-upgrade", "option forwardfor"),
        *("option forwarded", "option h1-*", "option http*", "option idle-close-on-response"),
        *("option originalto", "option prefer-last-server", "option forceclose"),
        *("req*", "rsp*", "block"),
        note=_HTTP,
    ),
    mapped("contimeout", to="backend.connect_timeout", note="an old name of `timeout connect`"),
    mapped("clitimeout", "srvtimeout", to="sql.idle_timeout", note="old names of `timeout client`, `server`"),
)

GLOBAL_RULES = index_rules(_GLOBAL)
PROXY_RULES = index_rules(_PROXY)
GLOBAL_TABLE, PROXY_TABLE = _GLOBAL, _PROXY

# The note of each other section, by kind.
SECTION_NOTES: Mapping[str, str] = {
    "resolvers": "Tidevoy uses the name servers of its machine (`/etc/resolv.conf`)",
    "peers": "Envoys share no tables: their control plane knows the sessions of all of them",
    "userlist": "callers of the REST API authenticate by tokens (`tidevoy token create`) or certificates",
    "mailers": "use the alerts of Prometheus (deploy/prometheus)",
    "ring": "Tidevoy writes its logs to files and standard error",
    "log-forward": "Tidevoy forwards no logs",
    "log-profile": "Tidevoy's logs are lines of JSON with fixed fields",
    "traces": "use `log.level: debug`",
    "cache": _HTTP,
    "fcgi-app": _HTTP,
    "http-errors": _HTTP,
    "crt-store": "name the files of certificates in `tls.client`",
    "acme": "certificates come from your own tools; Envoys read changed files at once",
    "program": "systemd or the container runtime starts other programs",
    "namespace_list": "Envoys use the network namespace in which they are started",
    "healthcheck": "Tidevoy has its own checks (`health`)",
}
OTHER_SECTION_NOTE = "Tidevoy has nothing of this kind"
UNKNOWN_NOTE = "unknown to this importer; check whether the proxy needs it"

DIFFERENCES = (
    DefaultDifference("timeout connect", "no limit", "backend.connect_timeout", "1 s", ""),
    DefaultDifference(
        "retries",
        "3, to the same server",
        "backend.max_connect_attempts",
        "3 nodes",
        "if all nodes refuse, a client goes on for `sql.wait_for_node`",
    ),
    DefaultDifference(
        "maxconn",
        "by the limit of open files",
        "sql.max_connections",
        "no limit",
        "`overload.max_connections` resets new connections above 50,000",
    ),
    DefaultDifference(
        "balance",
        "by turns or at random",
        "balance.policy",
        "resource",
        "by the number of sessions, and by health, memory and CPU of the nodes",
    ),
    DefaultDifference("server check", "off", "health", "on", "nodes are always checked"),
    DefaultDifference(
        "server inter",
        "every 2 s, 3 failures",
        "health.sql.interval",
        "every 1 s, 3 failures",
        "",
    ),
    DefaultDifference(
        "server slowstart", "off", "balance.slow_start", "10 s", "to keep it: `balance.slow_start: 0`"
    ),
    DefaultDifference("option tcpka", "off", "sql.keepalive_idle", "60 s", "TCP keepalive is always on"),
    DefaultDifference(
        "hard-stop-after",
        "no limit",
        "end.timeout",
        "30 s",
        "sessions end when they are idle; the rest after this time (docs/operate/stop-envoys.md)",
    ),
    DefaultDifference(
        "(TLS of clients)",
        "passed through to TiDB",
        "tls.client.mode",
        "disabled",
        "set `tls.client` and `tls.backend` if clients use TLS: Envoys end it, and begin it again"
        " (docs/operate/tls.md)",
    ),
    DefaultDifference(
        "(compression)",
        "passed through to TiDB",
        "sql.compression",
        "off",
        "`passthrough` allows it, but then sessions do not migrate",
    ),
    DefaultDifference(
        "server on-marked-down",
        "sessions stay",
        "backend.health_connections",
        "true",
        "sessions of a node that is unreachable for 4 s end, or continue on another node"
        " (docs/concepts/unreachable-nodes.md)",
    ),
)


def find_rule(rules: Mapping[str, KeyRule], words: Sequence[str]) -> tuple[str, KeyRule | None]:
    """Return the key of a statement, with as many words as the rule has, and the rule; None if unknown."""
    for length in (3, 2, 1):
        key = " ".join(words[:length])
        if len(words) >= length and key in rules:
            return key, rules[key]
    for length in (2, 1):
        key = " ".join(words[:length])
        for pattern, rule in rules.items():
            if pattern.endswith("*") and key.startswith(pattern[:-1]):
                return key, rule
    return words[0] if words[0] != "option" else " ".join(words[:2]), None
