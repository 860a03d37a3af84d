"""Invalid configurations, each with the expected error lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_QUOTING_HINT = (
    "check the indentation (only spaces), brackets and quotes there; text with `: `, `#`, `*` or brackets"
    " needs quotes"
)
_TOP_LEVEL_KEYS = (
    "pd, nodes, sql, backend, limits, statements, capture, tls, health, balance, groups, zones, backup,"
    " drain, module, migration, rebalance, rollouts, overload, envoy_health, end, xds, api, replicas, log,"
    " state_dir, allow_unauthenticated"
)


@dataclass(frozen=True)
class InvalidConfig:
    """A file, an environment, and the expected lines on standard error, in which `F` means the file."""

    text: str | bytes
    expected_lines: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


INVALID_CONFIGS: Mapping[str, InvalidConfig] = {
    "unknown_key": InvalidConfig(
        "pd:\n  url: [x]\n", ("F:2: pd.url: there is no such setting; did you mean pd.urls?",)
    ),
    "unknown_section": InvalidConfig(
        "\nproxy: {}\n",
        (f"F:2: proxy: there is no such setting; the known settings here are {_TOP_LEVEL_KEYS}",),
    ),
    "key_of_another_section": InvalidConfig(
        "listen: 0.0.0.0:6000\n",
        (
            "F:1: listen: there is no such setting; did you mean sql.listen or envoy_health.listen or"
            " xds.listen or api.listen?",
        ),
    ),
    "limit_rules": InvalidConfig(
        "limits:\n  rules:\n  - name: total\n    user: a\n    max_connections: 1\n"
        "  - name: b\n    max_connections: 1\n  - name: c\n    network: 10.0.0.0/8\n",
        (
            "F:3: limits.rules.0.name: total is the name of the limits of all connections; choose another"
            " name",
            "F:6: limits.rules.1: the rule b has neither a user nor a network; set one of them;"
            " limits.max_connections limits all connections",
            "F:8: limits.rules.2: the rule c limits nothing; set max_connections or"
            " max_new_connections_per_second",
        ),
    ),
    "limit_rules_with_one_name": InvalidConfig(
        "limits:\n  rules:\n  - {name: b, user: a, max_connections: 1}\n"
        "  - {name: b, user: c, max_connections: 1}\n",
        ("F:4: limits.rules.1.name: b is listed twice; give each rule its own name",),
    ),
    "duplicate_key": InvalidConfig(
        "sql:\n  max_connections: 1\n  max_connections: 2\n",
        ("F:3: sql.max_connections: the key occurs twice (first on line 2); keep one of the two",),
    ),
    "key_is_not_text": InvalidConfig("1: x\n", ("F:1: 1: the key is not text; put it in quotes",)),
    "tab": InvalidConfig(
        "pd:\n\turls: []\n",
        (f"F:2: this is not YAML (found character '\\t' that cannot start any token); {_QUOTING_HINT}",),
    ),
    "stray_colon": InvalidConfig(
        "sql: listen: 0.0.0.0:6000\n",
        (f"F:1: this is not YAML (mapping values are not allowed here); {_QUOTING_HINT}",),
    ),
    "ipv6_without_quotes": InvalidConfig(
        "log:\n  level: info\nsql:\n  listen: [::]:6000\n",
        (f"F:4: this is not YAML (expected the node content, but found ':'); {_QUOTING_HINT}",),
    ),
    "open_bracket": InvalidConfig(
        "pd:\n  urls: [http://a:2379\n",
        (f"F:3: this is not YAML (expected ',' or ']', but got '<stream end>'); {_QUOTING_HINT}",),
    ),
    "two_documents": InvalidConfig(
        "pd: {}\n---\nsql: {}\n",
        ("F:3: a second document begins here; put all settings into one document",),
    ),
    "list_at_the_top": InvalidConfig(
        "- pd\n",
        ("F:1: the file contains no settings; write `key: value` lines, such as `pd:`",),
    ),
    "not_utf8": InvalidConfig(
        b"# ok\nlog: {level: \xff}\n", ("F:2: the byte 0xff is not UTF-8; save the file as UTF-8",)
    ),
    "control_character": InvalidConfig(
        "pd: \x01\n", ("F:1: the character U+0001 is not allowed in YAML; remove it",)
    ),
    "alias_of_itself": InvalidConfig(
        "pd: &x [*x]\n", ("F:1: the values are nested too deeply; look for an alias that contains itself",)
    ),
    "python_tag": InvalidConfig(
        "log: {level: !!int x}\n", ("F: a value does not fit its !! tag; remove the tag",)
    ),
    "too_large": InvalidConfig(
        b"#" * (1 << 20) + b"\n",
        (
            "F: the file is larger than 1 MiB, so it is probably not a settings file;"
            " give the path of the settings file",
        ),
    ),
    "text_for_a_section": InvalidConfig(
        "pd: http://10.0.0.1:2379\n",
        ("F:1: pd: 'http://10.0.0.1:2379' is not allowed; write a mapping with urls, tls, keyspace",),
    ),
    "text_for_a_list": InvalidConfig(
        "pd:\n  urls: http://10.0.0.1:2379\n",
        (
            "F:2: pd.urls: 'http://10.0.0.1:2379' is not allowed; write a list, each item a URL, such as"
            " http://10.0.0.1:2379",
        ),
    ),
    "url_without_scheme": InvalidConfig(
        "pd:\n  urls:\n  - http://a:2379\n  - 10.0.0.1:2379\n",
        (
            "F:4: pd.urls.1: '10.0.0.1:2379' is not an http:// or https:// URL; write a URL, such as"
            " http://10.0.0.1:2379",
        ),
    ),
    "url_without_port": InvalidConfig(
        "pd: {urls: [http://pd]}\n", ("F:1: pd.urls.0: 'pd' has no port; write it as host:port",)
    ),
    "url_with_password": InvalidConfig(
        "pd: {urls: ['http://root:hunter2@pd:2379']}\n",
        ("F:1: pd.urls.0: the URL contains a user; remove the part before the @",),
    ),
    "mixed_schemes": InvalidConfig(
        "pd: {urls: [http://a:1, https://b:1]}\n",
        ("F:1: pd.urls: mixes http and https; use the scheme that PD serves on all members",),
    ),
    "url_twice": InvalidConfig(
        "pd: {urls: [http://a:1, http://a:1/]}\n",
        ("F:1: pd.urls.1: http://a:1 is listed twice; write each member once",),
    ),
    "tls_with_http": InvalidConfig(
        "pd:\n  urls: [http://a:1]\n  tls: {ca: ca.pem}\n",
        ("F:2: pd.urls: are http URLs, but pd.tls is set; write https:// URLs, or remove pd.tls",),
    ),
    "keyspace_by_name": InvalidConfig(
        "pd: {keyspace: prod}\n",
        ("F:1: pd.keyspace: 'prod' is not allowed; write digits without leading zeros, such as 5",),
    ),
    "number_too_small": InvalidConfig(
        "health:\n  sql:\n    rise: 0\n",
        ("F:3: health.sql.rise: 0 is not allowed; write a whole number from 1 to 100",),
    ),
    "number_too_large": InvalidConfig(
        "health: {status: {interval: 5000}}\n",
        ("F:1: health.status.interval: 5000 is not allowed; write a number of seconds from 0.05 to 300",),
    ),
    "number_at_its_open_end": InvalidConfig(
        "backend: {connect_timeout: 0}\n",
        ("F:1: backend.connect_timeout: 0 is not allowed; write a number of seconds above 0 and at most 60",),
    ),
    "unit_in_the_number": InvalidConfig(
        "drain: {gone_grace: 10m}\n",
        ("F:1: drain.gone_grace: '10m' is not allowed; write a number of seconds from 0 to 86400",),
    ),
    "fraction_for_a_count": InvalidConfig(
        "sql: {max_connections: 1.5}\n",
        ("F:1: sql.max_connections: 1.5 is not allowed; write a whole number from 0 to 10000000",),
    ),
    "truth_for_a_number": InvalidConfig(
        "health: {sql: {fall: true}}\n",
        ("F:1: health.sql.fall: true is not a number; write a whole number from 1 to 100",),
    ),
    "infinite": InvalidConfig(
        "balance: {slow_start: .inf}\n",
        ("F:1: balance.slow_start: inf is not allowed; write a number of seconds from 0 to 3600",),
    ),
    "neither_true_nor_false": InvalidConfig(
        "health: {sql: {enabled: maybe}}\n",
        ("F:1: health.sql.enabled: 'maybe' is not allowed; write true or false",),
    ),
    "no_such_choice": InvalidConfig(
        "sql: {proxy_protocol: on}\n",
        ("F:1: sql.proxy_protocol: 'on' is not allowed; write one of off, optional, required",),
    ),
    "no_such_filter": InvalidConfig(
        "xds: {filter: stock}\n",
        ("F:1: xds.filter: 'stock' is not allowed; write one of auto, module, contrib, none",),
    ),
    "tls_without_the_module": InvalidConfig(
        "tls: {backend: {mode: required}}\nxds: {filter: none}\n",
        (
            "F:2: xds.filter: is none, but tls.backend.mode is set to required, which needs Tidevoy's"
            " module; set auto or module",
        ),
    ),
    "tls_without_a_certificate": InvalidConfig(
        "tls:\n  client:\n    mode: optional\n",
        ("F:3: tls.client.mode: is optional, but cert is not set; set cert too",),
    ),
    "tls_without_a_key": InvalidConfig(
        "tls: {client: {mode: required, cert: /c.pem}}\n",
        ("F:1: tls.client.mode: is required, but key is not set; set key too",),
    ),
    "certificate_for_no_tls": InvalidConfig(
        "tls:\n  client:\n    cert: /c.pem\n    key: /k.pem\n",
        (
            "F:3: tls.client.cert: is set, but mode is disabled; set mode: optional or required, or remove"
            " cert",
        ),
    ),
    "ca_for_no_tls": InvalidConfig(
        "tls: {backend: {ca: /ca.pem}}\n",
        ("F:1: tls.backend.ca: is set, but mode is disabled; set mode: preferred or required, or remove ca",),
    ),
    "ca_that_checks_nothing": InvalidConfig(
        "tls: {backend: {mode: required, ca: /ca.pem, verify: none}}\n",
        ("F:1: tls.backend.ca: is set, but verify is none; set verify: full or verify: ca, or remove ca",),
    ),
    "crl_that_checks_nothing": InvalidConfig(
        "tls: {backend: {mode: required, crl: /nodes.crl, verify: none}}\n",
        ("F:1: tls.backend.crl: is set, but verify is none; set verify: full or verify: ca, or remove crl",),
    ),
    "crl_for_no_tls": InvalidConfig(
        "tls: {backend: {crl: /nodes.crl}}\n",
        (
            "F:1: tls.backend.crl: is set, but mode is disabled; set mode: preferred or required,"
            " or remove crl",
        ),
    ),
    "crl_without_client_ca": InvalidConfig(
        "tls: {client: {mode: optional, cert: /c.pem, key: /k.pem, crl: /clients.crl}}\n",
        ("F:1: tls.client.crl: is set, but client_ca is not; set client_ca too, or remove crl",),
    ),
    "backend_key_without_certificate": InvalidConfig(
        "tls: {backend: {mode: required, key: /k.pem}}\n",
        ("F:1: tls.backend.key: is set without cert; set cert too, or neither",),
    ),
    "relative_path_for_the_envoys": InvalidConfig(
        "tls: {client: {mode: optional, cert: c.pem, key: /k.pem}}\n",
        (
            "F:1: tls.client.cert: 'c.pem' is a relative path, and an Envoy may be started in any directory;"
            " write an absolute path on the Envoys' machines, such as /etc/tidevoy/server.pem",
        ),
    ),
    "no_such_compression": InvalidConfig(
        "sql: {compression: zstd}\n",
        ("F:1: sql.compression: 'zstd' is not allowed; write one of off, passthrough",),
    ),
    "no_time_for_a_login": InvalidConfig(
        "sql: {login_timeout: 0}\n",
        ("F:1: sql.login_timeout: 0 is not allowed; write a number of seconds above 0 and at most 3600",),
    ),
    "empty_text": InvalidConfig(
        "state_dir: ''\n", ("F:1: state_dir: the text is empty; write the path of a directory",)
    ),
    "port_only": InvalidConfig(
        "sql: {listen: ':6000'}\n",
        (
            "F:1: sql.listen: ':6000' has no address; write 0.0.0.0:6000 for every IPv4 address of the"
            " machine",
        ),
    ),
    "port_out_of_range": InvalidConfig(
        "sql: {listen: '0.0.0.0:66000'}\n",
        (
            "F:1: sql.listen: the port of '0.0.0.0:66000' is not a number from 1 to 65535; write an IP"
            " address and a port, such as 0.0.0.0:6000",
        ),
    ),
    "host_name_for_envoy": InvalidConfig(
        "sql: {listen: 'localhost:6000'}\n",
        (
            "F:1: sql.listen: 'localhost:6000' has a host name, and Envoy listens on IP addresses only;"
            " write an IP address and a port, such as 0.0.0.0:6000",
        ),
    ),
    "proxy_outside_its_network": InvalidConfig(
        "api: {trusted_proxies: [10.0.0.1/8]}\n",
        (
            "F:1: api.trusted_proxies.0: 10.0.0.1/8 has host bits set; write a network such as 10.0.0.0/8, or"
            " one address",
        ),
    ),
    "api_for_everyone": InvalidConfig(
        "api: {listen: 0.0.0.0:3080}\n",
        (
            "F:1: api.listen: 0.0.0.0:3080 can be reached from other machines, and the REST server does not"
            " authenticate callers; set api.tokens and api.tls, listen on 127.0.0.1, or set"
            " allow_unauthenticated: true if the network itself restricts access",
        ),
    ),
    "tokens_in_clear_text": InvalidConfig(
        f"api:\n  listen: 0.0.0.0:3080\n  tokens: [{{name: a, role: viewer, sha256: {'a' * 64}}}]\n",
        (
            "F:2: api.listen: 0.0.0.0:3080 can be reached from other machines, and tokens would be sent in"
            " clear text; set api.tls, listen on 127.0.0.1, or set api.allow_cleartext_tokens: true if a"
            " proxy in front terminates TLS",
        ),
    ),
    "token_instead_of_its_hash": InvalidConfig(
        "api:\n  tokens:\n  - name: a\n    role: viewer\n    sha256: tvy_hunter2hunter2\n",
        (
            "F:5: api.tokens.0.sha256: this is not a SHA-256 hash; write the 64 characters (0-9, a-f) that"
            " `tidevoy token create` prints",
        ),
    ),
    "token_twice": InvalidConfig(
        f"api: {{tokens: [{{name: a, role: viewer, sha256: {'a' * 64}}}, {{name: a, role: operator, sha256:"
        f" {'b' * 64}}}]}}\n",
        ("F:1: api.tokens.1.name: a is listed twice; give each its own name",),
    ),
    "token_of_nobody": InvalidConfig(
        f"api: {{tokens: [{{name: anonymous, role: viewer, sha256: {'a' * 64}}}]}}\n",
        (
            "F:1: api.tokens.0.name: anonymous is reserved for unauthenticated callers in audit events;"
            " choose another name",
        ),
    ),
    "host_name_with_a_port": InvalidConfig(
        "api: {host_names: ['http://tidevoy.example.org:3080']}\n",
        (
            "F:1: api.host_names.0: 'http://tidevoy.example.org:3080' is not a host name; write it without"
            " scheme and port, as in tidevoy.example.org",
        ),
    ),
    "clients_without_a_ca": InvalidConfig(
        "api: {clients: [{name: a, role: viewer}]}\n",
        ("F:1: api.clients: are set, but clients are not asked for a certificate; set api.tls.client_ca",),
    ),
    "client_ca_without_clients": InvalidConfig(
        "api:\n  tls: {cert: /c, key: /k, client_ca: /a}\n",
        (
            "F:2: api.tls.client_ca: is set, but no client is authorized; list the authorized certificates"
            " in api.clients",
        ),
    ),
    "xds_for_everyone": InvalidConfig(
        "xds: {listen: '[::]:18000'}\n",
        (
            "F:1: xds.listen: [::]:18000 can be reached from other machines, and the xDS server does not"
            " authenticate clients; set xds.tls.client_ca, listen on 127.0.0.1, or set"
            " allow_unauthenticated: true",
        ),
    ),
    "same_port": InvalidConfig(
        "api: {listen: 127.0.0.1:6000}\n",
        (
            "F:1: api.listen: api.listen and sql.listen (0.0.0.0:6000) have the same port; choose another"
            " port for one of them",
        ),
    ),
    "node_without_address": InvalidConfig(
        "nodes:\n- weight: 5\n",
        ("F:2: nodes.0.address: is missing; write host:port, such as 10.0.0.1:4000",),
    ),
    "node_twice": InvalidConfig(
        "nodes:\n- address: tidb-0:4000\n- address: tidb-0:4000\n",
        ("F:3: nodes.1.address: tidb-0:4000 is listed twice; write each node once",),
    ),
    "node_as_text": InvalidConfig(
        "nodes: ['tidb-0:4000']\n",
        (
            "F:1: nodes.0: 'tidb-0:4000' is not allowed; write a mapping with address,"
            " status_address, weight, labels",
        ),
    ),
    "label_is_a_number": InvalidConfig(
        "nodes:\n- address: tidb-0:4000\n  labels:\n    zone: 1\n",
        ("F:4: nodes.0.labels.zone: 1 is not text; put it in quotes",),
    ),
    "certificate_without_key": InvalidConfig(
        "pd: {urls: [https://a:1], tls: {cert: good.pem}}\n",
        ("F:1: pd.tls.cert: is set without key; set key too, or neither",),
    ),
    "no_such_file": InvalidConfig(
        "pd: {urls: [https://a:1], tls: {ca: /no/ca.pem}}\n",
        (
            "F:1: pd.tls.ca: /no/ca.pem cannot be read: No such file or directory; name a PEM file that"
            " Tidevoy can read",
        ),
    ),
    "directory_for_a_certificate": InvalidConfig(
        "xds:\n  tls:\n    cert: good.pem\n    key: /etc\n",
        ("F:4: xds.tls.key: /etc cannot be read: Is a directory; name a PEM file that Tidevoy can read",),
    ),
    "not_pem": InvalidConfig(
        "xds:\n  tls:\n    cert: bad.pem\n    key: good.key\n",
        (
            "F:3: xds.tls.cert: bad.pem is not a certificate in PEM format; name a PEM file, which"
            " begins with -----BEGIN",
        ),
    ),
    "key_is_not_pem": InvalidConfig(
        "xds: {tls: {cert: good.pem, key: bad.pem}}\n",
        (
            "F:1: xds.tls.key: bad.pem is not a key in PEM format; name a PEM file, which begins with"
            " -----BEGIN",
        ),
    ),
    "key_of_another_certificate": InvalidConfig(
        "xds: {tls: {cert: good.pem, key: other.key}}\n",
        (
            "F:1: xds.tls.key: the key in other.key does not match the certificate in good.pem; name the"
            " matching key",
        ),
    ),
    "encrypted_key": InvalidConfig(
        "xds: {tls: {cert: good.pem, key: encrypted.key}}\n",
        ("F:1: xds.tls.key: the key in encrypted.key is encrypted; name a key without a passphrase",),
    ),
    "tls_switched_off": InvalidConfig(
        "health: {status: {client_tls: {ca: good.pem}}}\n",
        ("F:1: health.status.client_tls: is set, but tls is false; set tls: true, or remove client_tls",),
    ),
    "statement_check_without_user": InvalidConfig(
        "health: {statement: {enabled: true}}\n",
        ("F:1: health.statement.enabled: is true, but user is not set; set user too",),
    ),
    "statement_check_too_fast": InvalidConfig(
        "health: {statement: {timeout: 0.05}}\n",
        ("F:1: health.statement.timeout: 0.05 is not allowed; write a number of seconds from 0.1 to 60",),
    ),
    "several": InvalidConfig(
        "log:\n  level: loud\nhealth:\n  sql:\n    rise: x\n",
        (
            "F:5: health.sql.rise: 'x' is not allowed; write a whole number from 1 to 100",
            "F:2: log.level: 'loud' is not allowed; write one of debug, info, warning, error",
        ),
    ),
    "unknown_variable": InvalidConfig(
        "",
        (
            "TIDEVOY_PD_URLS: no setting has this name; did you mean TIDEVOY_PD__URLS? (levels are"
            " joined by __)",
        ),
        {"TIDEVOY_PD_URLS": "http://a:1"},
    ),
    "variable_of_a_section": InvalidConfig(
        "",
        (
            "TIDEVOY_LOG: no setting has this name; did you mean TIDEVOY_LOG__LEVEL? (levels are"
            " joined by __)",
        ),
        {"TIDEVOY_LOG": "debug"},
    ),
    "bad_variable_over_a_good_file": InvalidConfig(
        "health: {sql: {rise: 3}}\n",
        (
            "TIDEVOY_HEALTH__SQL__RISE: health.sql.rise: 'many' is not allowed; write a whole number"
            " from 1 to 100",
        ),
        {"TIDEVOY_HEALTH__SQL__RISE": "many"},
    ),
    "variable_is_not_json": InvalidConfig(
        "",
        (
            "TIDEVOY_NODES: nodes: the value is not JSON; write JSON: a list, each item a mapping with"
            " address, status_address, weight, labels",
        ),
        {"TIDEVOY_NODES": "tidb-0:4000"},
    ),
    "half_a_pair_of_variables": InvalidConfig(
        "",
        ("TIDEVOY_XDS__TLS__CERT: xds.tls.key: is missing; write the path of a file",),
        {"TIDEVOY_XDS__TLS__CERT": "good.pem"},
    ),
}

# One configuration of each kind. `tidevoy serve` must report the same errors as `tidevoy config check`.
CHECKED_BY_SERVE = (
    "unknown_key",
    "tab",
    "not_utf8",
    "api_for_everyone",
    "key_of_another_certificate",
    "unknown_variable",
)
