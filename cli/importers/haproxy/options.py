"""The options of `bind` and `server` lines in HAProxy's configuration, and how each is converted.

Source: section 5 of HAProxy's configuration manual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.importers.key_rules import KeyRule, index_rules, mapped, needless, no_equivalent

_TUNING = "Envoy needs no such tuning"
_HTTP = "it is for HTTP"
_TLS_START = (
    "HAProxy expects TLS from the first byte; MySQL clients and TiDB negotiate it in MySQL's protocol"
)
_NO_CIPHERS = "the module uses modern ciphers of TLS 1.2 and 1.3, which cannot be changed"
_CERTIFICATE_FILE = "the file must contain the key too; otherwise set `key`"

BIND_TABLE = (
    mapped(
        "ssl",
        to="tls.client.mode",
        note=f"`required`. {_TLS_START}, so clients must connect without their own TLS tunnel",
    ),
    mapped(
        "crt",
        to="tls.client.cert, tls.client.key",
        note=f"a directory has no equivalent; {_CERTIFICATE_FILE}",
    ),
    mapped(
        "ca-file",
        to="tls.client.client_ca",
        note="only with `verify required`; then each client needs a certificate",
    ),
    mapped("crl-file", to="tls.client.crl"),
    mapped("ssl-min-ver", to="tls.client.min_version"),
    mapped("verify", to="tls.client.client_ca", note="`optional` has no equivalent"),
    mapped(
        "accept-proxy",
        to="sql.proxy_protocol, sql.trusted_proxies",
        note="`required`, from any address as in HAProxy. List the networks of your proxies instead",
    ),
    mapped("maxconn", to="sql.max_connections", note="the lowest one counts"),
    no_equivalent(
        *("crt-list", "default-crt", "strict-sni", "no-strict-sni", "generate-certificates"),
        *("ca-sign-file", "ca-sign-pass", "ech", "label"),
        note="Envoys have one certificate for clients",
    ),
    no_equivalent(
        *("ciphers", "ciphersuites", "curves", "ecdhe", "sigalgs", "client-sigalgs"),
        *("force-sslv3", "force-tlsv10", "force-tlsv11", "force-tlsv12", "force-tlsv13"),
        *("no-tlsv12", "no-tlsv13", "ssl-max-ver", "prefer-client-ciphers"),
        note=_NO_CIPHERS,
    ),
    needless("no-sslv3", "no-tlsv10", "no-tlsv11", note="the module has only TLS 1.2 and 1.3"),
    no_equivalent(
        *("ca-ignore-err", "crt-ignore-err", "ca-verify-file", "no-ca-names"),
        note="certificates of clients are always verified in full",
    ),
    no_equivalent("accept-netscaler-cip", note="use the PROXY protocol (`sql.proxy_protocol`)"),
    no_equivalent(
        *("transparent", "namespace", "interface", "v4v6", "v6only", "tcp-md5sig"),
        note="`sql.listen` is an address only; `[::]` also accepts IPv4",
    ),
    needless(
        *("allow-0rtt", "tls-tickets", "no-tls-tickets", "tls-ticket-keys", "ktls", "backlog"),
        *("defer-accept", "mss", "nice", "process", "shards", "tcp-ut", "tcp-ss", "tfo", "thread", "cc"),
        *("name", "id", "guid-prefix", "expose-fd", "level", "severity-output", "idle-ping", "nbconn"),
        *("uid", "gid", "user", "group", "mode"),
        note=_TUNING,
    ),
    needless(
        *("alpn", "no-alpn", "npn", "proto", "quic-cc-algo", "quic-force-retry", "quic-socket"),
        note=_HTTP,
    ),
)

SERVER_TABLE = (
    mapped(
        "weight",
        to="nodes.*.weight",
        note="scaled so that the most frequent weight becomes 100. A server with weight 0 is left out",
    ),
    mapped("backup", to="backup.labels", note="with the label `role: backup` of the node"),
    mapped("disabled", to="nodes", note="the server is left out; add it later with `tidevoy add`"),
    mapped("check", to="health.sql.enabled", note="Tidevoy checks all nodes"),
    mapped("inter", to="health.sql.interval", note="also of the other checks that are imported"),
    mapped("rise", to="health.sql.rise", note="as `inter`"),
    mapped("fall", to="health.sql.fall", note="as `inter`"),
    mapped("port", to="nodes.*.status_address", note="with `option httpchk`; otherwise the SQL port"),
    mapped("addr", to="nodes.*.status_address", note="with `option httpchk`"),
    mapped("check-ssl", to="health.status.tls", note="with `option httpchk`"),
    mapped("slowstart", to="balance.slow_start", note="the longest one, for all nodes"),
    mapped(
        "send-proxy",
        to="backend.proxy_protocol",
        note="`v1`. TiDB's `proxy-protocol.networks` must contain the Envoys",
    ),
    mapped("send-proxy-v2", "send-proxy-v2-ssl", "send-proxy-v2-ssl-cn", to="backend.proxy_protocol"),
    mapped(
        "ssl", to="tls.backend.mode", note=f"`required`. {_TLS_START}, so no TLS tunnel may be in between"
    ),
    mapped("ca-file", to="tls.backend.ca"),
    mapped(
        "verify",
        to="tls.backend.verify",
        note="`none` is `none`, and `required` is `ca`, or `full` with `verifyhost` or `sni`",
    ),
    mapped("crl-file", to="tls.backend.crl"),
    mapped("crt", to="tls.backend.cert, tls.backend.key", note=_CERTIFICATE_FILE),
    mapped("ssl-min-ver", to="tls.backend.min_version"),
    mapped(
        *("verifyhost", "sni", "sni-auto"),
        to="tls.backend.verify",
        note="`full`: the name is the host of the node's address",
    ),
    needless("no-verifyhost", "no-sni-auto", note="`tls.backend.verify` is `ca`"),
    no_equivalent(
        *("maxconn", "minconn", "maxqueue", "strict-maxconn"),
        note="TiDB limits its connections itself (`max_connections`): clients then go to another node",
    ),
    no_equivalent(
        *("fastinter", "downinter", "init-state", "track", "check-sni", "check-sni-auto", "check-alpn"),
        *("check-proto", "check-via-socks4", "healthcheck", "check-pool-conn-name", "no-check-sni-auto"),
        note="all nodes have the same checks, which always have the same interval",
    ),
    no_equivalent(
        *("agent-check", "agent-send", "agent-inter", "agent-addr", "agent-port"),
        note="with `balance.policy: resource`, Tidevoy reads the load of the nodes itself",
    ),
    needless(
        *("check-send-proxy", "no-check", "no-check-ssl", "no-agent-check", "no-check-send-proxy"),
        note="Tidevoy's checks send a PROXY header where clients do",
    ),
    needless(
        *("observe", "on-error", "error-limit"),
        note="an Envoy ejects a node after a failed connection (`backend.ejection_time`)",
    ),
    no_equivalent(
        "on-marked-down",
        note="the sessions of an unreachable node end within 4 s; those of a node that fails other checks"
        " stay",
    ),
    needless("on-marked-up", note="with the module, sessions move back from backup nodes without a cut"),
    no_equivalent("cookie", "stick", "non-stick", note="any node may serve any client"),
    needless(
        *("resolvers", "init-addr", "resolve-opts", "resolve-prefer", "resolve-net"),
        note="the control plane resolves names again and again, with the name servers of its machine",
    ),
    no_equivalent(
        "proxy-v2-options", "set-proxy-v2-tlv-fmt", note="the header contains the two addresses only"
    ),
    no_equivalent("source", "usesrc", note="TiDB gets clients' addresses by `backend.proxy_protocol`"),
    no_equivalent("socks4", "namespace", "interface", "tcp-md5sig", note="Envoys connect to nodes directly"),
    no_equivalent(
        *("ciphers", "ciphersuites", "curves", "sigalgs", "client-sigalgs", "ssl-max-ver"),
        *("force-sslv3", "force-tlsv10", "force-tlsv11", "force-tlsv12", "force-tlsv13"),
        *("no-tlsv12", "no-tlsv13", "renegotiate", "no-renegotiate"),
        note=_NO_CIPHERS,
    ),
    needless("no-sslv3", "no-tlsv10", "no-tlsv11", note="the module has only TLS 1.2 and 1.3"),
    needless(
        *("enabled", "id", "guid", "no-backup", "no-ssl", "no-send-proxy", "no-send-proxy-v2"),
        *("no-send-proxy-v2-ssl", "no-send-proxy-v2-ssl-cn", "no-ssl-reuse", "ssl-reuse", "allow-0rtt"),
        *("no-tls-tickets", "tls-tickets", "ktls", "no-tfo", "tfo", "tcp-ut", "cc", "hash-key", "shard"),
        *("idle-ping", "log-bufsize", "log-proto", "quic-cc-algo"),
        note="it is the default, or has no effect in Tidevoy",
    ),
    needless(
        *("alpn", "npn", "proto", "ws", "redir", "max-reuse", "pool-conn-name", "pool-low-conn"),
        *("pool-max-conn", "pool-purge-delay", "check-reuse-pool", "no-check-reuse-pool"),
        note=_HTTP,
    ),
)

BIND_RULES, SERVER_RULES = index_rules(BIND_TABLE), index_rules(SERVER_TABLE)

# Options without a value.
_BIND_FLAGS = frozenset(
    (
        *("accept-proxy", "allow-0rtt", "defer-accept", "force-sslv3", "force-tlsv10", "force-tlsv11"),
        *("force-tlsv12", "force-tlsv13", "generate-certificates", "no-alpn", "no-ca-names", "no-sslv3"),
        *("no-strict-sni", "no-tls-tickets", "no-tlsv10", "no-tlsv11", "no-tlsv12", "no-tlsv13"),
        *("prefer-client-ciphers", "quic-force-retry", "ssl", "strict-sni", "tfo", "tls-tickets"),
        *("transparent", "v4v6", "v6only"),
    )
)
_SERVER_FLAGS = frozenset(
    (
        *("agent-check", "allow-0rtt", "backup", "check", "check-reuse-pool", "check-send-proxy"),
        *("check-sni-auto", "check-ssl", "check-via-socks4", "disabled", "enabled", "force-sslv3"),
        *("force-tlsv10", "force-tlsv11", "force-tlsv12", "force-tlsv13", "no-agent-check", "no-backup"),
        *("no-check", "no-check-reuse-pool", "no-check-send-proxy", "no-check-sni-auto", "no-check-ssl"),
        *("no-renegotiate", "no-send-proxy", "no-send-proxy-v2", "no-send-proxy-v2-ssl"),
        *("no-send-proxy-v2-ssl-cn", "no-sni-auto", "no-ssl", "no-ssl-reuse", "no-sslv3", "no-tfo"),
        *("no-tls-tickets", "no-tlsv10", "no-tlsv11", "no-tlsv12", "no-tlsv13", "no-verifyhost"),
        *("non-stick", "renegotiate", "send-proxy", "send-proxy-v2", "send-proxy-v2-ssl"),
        *("send-proxy-v2-ssl-cn", "sni-auto", "ssl", "ssl-reuse", "stick", "strict-maxconn", "tfo"),
        *("tls-tickets",),
    )
)


@dataclass(frozen=True, slots=True)
class Option:
    """An option and its value; a flag has an empty value. `is_known`: whether the importer knows it."""

    name: str
    value: str = ""
    is_known: bool = True


def split_bind_options(words: Sequence[str]) -> list[Option]:
    return _split_options(words, BIND_RULES, _BIND_FLAGS)


def split_server_options(words: Sequence[str]) -> list[Option]:
    return _split_options(words, SERVER_RULES, _SERVER_FLAGS)


def _split_options(words: Sequence[str], rules: Mapping[str, KeyRule], flags: frozenset[str]) -> list[Option]:
    options: list[Option] = []
    position = 0
    while position < len(words):
        name = words[position].partition("(")[0]
        position += 1
        is_known = name in rules
        following = words[position] if position < len(words) else ""
        # An unknown option may be a flag: then the next word is an option, too.
        has_value = name not in flags if is_known else bool(following) and following not in rules
        options.append(Option(name, following if has_value else "", is_known))
        position += has_value
    return options
