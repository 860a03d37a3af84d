"""Import of TiProxy's configuration: every key is converted as listed, and the YAML always loads."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.importers.key_rules import ValueKind
from cli.importers.report import Outcome
from cli.importers.tiproxy.conversion import import_tiproxy
from cli.importers.tiproxy.keys import RULES
from controlplane.errors import ConfigError
from tests.support.imports import load_settings, row_of, rows_of

# The keys of the structs in lib/config at commit dd4b39c2103944c8f3b4f805e26fa0249f05508b of TiProxy.
_KEEPALIVE = ("enabled", "idle", "cnt", "intvl", "timeout")
_TLS = (
    *("cert", "key", "ca", "min-tls-version", "cert-allowed-cn", "auto-certs", "rsa-key-size"),
    *("autocert-expire-duration", "skip-ca"),
)
CURRENT_KEYS = (
    *(
        f"proxy.{name}"
        for name in (
            *("addr", "advertise-addr", "pd-addrs", "port-range", "max-connections", "conn-buffer-size"),
            *("high-memory-usage-reject-threshold", "proxy-protocol", "graceful-wait-before-shutdown"),
            *("graceful-close-conn-timeout", "public-endpoints", "fail-backend-list", "failover-timeout"),
            *(f"frontend-keepalive.{name}" for name in _KEEPALIVE),
            *(f"backend-healthy-keepalive.{name}" for name in _KEEPALIVE),
            *(f"backend-unhealthy-keepalive.{name}" for name in _KEEPALIVE),
            *(f"backend-clusters[].{name}" for name in ("name", "pd-addrs", "ns-servers")),
        )
    ),
    *("api.addr", "api.proxy-protocol", "workdir", "enable-traffic-replay"),
    *(
        f"security.{section}.{name}"
        for section in ("server-tls", "server-http-tls", "cluster-tls", "sql-tls")
        for name in _TLS
    ),
    *("security.encryption-key-path", "security.require-backend-tls"),
    *("log.encoder", "log.simple", "log.level", "log.log-file.filename", "log.log-file.max-size"),
    *("log.log-file.max-days", "log.log-file.max-backups"),
    *("balance.label-name", "balance.routing-rule", "balance.policy", "balance.routing-policy"),
    *(
        f"balance.{name}.migrations-per-second"
        for name in ("status", "health", "memory", "cpu", "location", "conn-count")
    ),
    "balance.conn-count.count-ratio-threshold",
    *("labels.zone", "labels.anything"),
    *(f"ha.{name}" for name in ("virtual-ip", "interface", "garp-burst-count", "garp-refresh-count")),
    # The metering SDK at v0.0.0-20260324055927-14fead745f1d, which that commit uses.
    *(f"metering.{name}" for name in ("type", "region", "bucket", "prefix", "endpoint", "shared-pool-id")),
    *(f"metering.aws.{name}" for name in ("assume-role-arn", "s3-force-path-style", "access-key")),
    *(f"metering.aws.{name}" for name in ("secret-access-key", "session-token")),
    *(f"metering.oss.{name}" for name in ("assume-role-arn", "access-key", "secret-access-key")),
    *("metering.oss.session-token",),
    *(f"metering.azure.{name}" for name in ("account-name", "account-key", "sas-token")),
    *(f"metering.localfs.{name}" for name in ("base-path", "create-dirs", "permissions")),
)
# Keys of earlier commits that are written in TOML (December 2022 and later), and of conf/proxy.toml.
REMOVED_KEYS = (
    *("proxy.tcp-keep-alive", "proxy.require-backend-tls", "proxy.server-version"),
    *(f"proxy.backend-keepalive.{name}" for name in ("enabled", "idle", "cnt", "intvl")),
    *("api.enable-basic-auth", "api.user", "api.password"),
    *("advance.ignore-wrong-namespace", "advance.peer-port", "advance.watch-interval"),
    *("metrics.metrics-addr", "metrics.metrics-interval"),
    *(f"security.peer-tls.{name}" for name in _TLS if name != "cert-allowed-cn"),
    *("security.rsa-key-size", "security.encryption.key-path"),
    *(f"balance.{name}.enable" for name in ("cpu", "error", "label", "location", "memory")),
    *("balance.label.label-name", "balance.location.location-first", "balance.route-policy"),
    "metering.role-arn",
)
VALUES = {
    ValueKind.TEXT: '"x"',
    ValueKind.INTEGER: "7",
    ValueKind.NUMBER: "1.5",
    ValueKind.BOOLEAN: "true",
    ValueKind.DURATION: '"30s"',
    ValueKind.TEXTS: '["x"]',
    ValueKind.INTEGERS: "[6000, 6001]",
    ValueKind.ANY: '"x"',
}


def toml_of(key: str, value: str) -> str:
    table, _, name = key.rpartition(".")
    header = f"[[{table.removesuffix('[]')}]]" if table.endswith("[]") else f"[{table}]"
    return f"{header if table else ''}\n{name} = {value}\n"


@pytest.mark.parametrize("key", [*CURRENT_KEYS, *REMOVED_KEYS])
def test_knows_every_key(key: str) -> None:
    rule = RULES.get(key, RULES["labels.*"])
    result = import_tiproxy(toml_of(key, VALUES[rule.kind]), "tiproxy.toml")
    rows = rows_of(result, key.replace("[]", "[0]"))
    assert rows
    for row in rows:
        assert row.outcome is not Outcome.UNKNOWN
        assert row.line == 2
        assert row.note or row.outcome is Outcome.MAPPED
    load_settings(result)


def test_has_no_rule_for_other_keys() -> None:
    covered = {"labels.*" if key == "labels.anything" else key for key in (*CURRENT_KEYS, *REMOVED_KEYS)}
    # These two tables, and this key, are from before TiProxy used TOML.
    older = {f"security.{side}.{name}" for side in ("cluster", "server") for name in ("ca", "cert", "key")}
    assert set(RULES) == covered | older | {"metrics.prom-cluster"}


PD = 'pd-addrs = "10.0.0.1:2379"\n'
CERT = 'cert = "/c.pem"\nkey = "/k.pem"\n'


# File, key, setting, and its value in the settings.
MAPPED: list[tuple[str, str, str, Any]] = [
    ('[proxy]\naddr = "10.0.0.9:6001"', "proxy.addr", "sql.listen", "10.0.0.9:6001"),
    ('[proxy]\naddr = ":6001"', "proxy.addr", "sql.listen", "0.0.0.0:6001"),
    ('[proxy]\naddr = "[::]:6001"', "proxy.addr", "sql.listen", "[::]:6001"),
    ("[proxy]\nport-range = [6002, 6004]", "proxy.port-range", "sql.listen", "0.0.0.0:6002"),
    ('[proxy]\npd-addrs = "a:1, b:2"', "proxy.pd-addrs", "pd.urls", ("http://a:1", "http://b:2")),
    ("[proxy]\nmax-connections = 100", "proxy.max-connections", "sql.max_connections", 100),
    (
        '[proxy.backend-healthy-keepalive]\nidle = "1m30s"',
        "proxy.backend-healthy-keepalive.idle",
        "backend.keepalive_idle",
        90,
    ),
    (
        "[proxy.backend-healthy-keepalive]\nintvl = 2500000000",  # nanoseconds
        "proxy.backend-healthy-keepalive.intvl",
        "backend.keepalive_interval",
        2,
    ),
    (
        "[proxy]\nbackend-healthy-keepalive = { cnt = 4 }",
        "proxy.backend-healthy-keepalive.cnt",
        "backend.keepalive_probes",
        4,
    ),
    ('[proxy]\nproxy-protocol = "v2"', "proxy.proxy-protocol", "sql.proxy_protocol", "optional"),
    ('[proxy]\nproxy-protocol = ""', "proxy.proxy-protocol", "sql.proxy_protocol", "off"),
    ("[proxy]\ngraceful-wait-before-shutdown = 30", "proxy.graceful-wait-before-shutdown", "end.wait", 30),
    ("[proxy]\ngraceful-close-conn-timeout = 15", "proxy.graceful-close-conn-timeout", "end.timeout", 15),
    (
        '[[proxy.backend-clusters]]\nname = "a"\npd-addrs = "a:1"',
        "proxy.backend-clusters[0].pd-addrs",
        "pd.urls",
        ("http://a:1",),
    ),
    ('[api]\naddr = "127.0.0.1:3081"', "api.addr", "api.listen", "127.0.0.1:3081"),
    (f"[security.server-tls]\n{CERT}", "security.server-tls.key", "tls.client.mode", "optional"),
    (
        f'[security.server-tls]\n{CERT}min-tls-version = "1.3"',
        "security.server-tls.min-tls-version",
        "tls.client.min_version",
        "TLSv1.3",
    ),
    ('[security.sql-tls]\nca = "/ca.pem"', "security.sql-tls.ca", "tls.backend.mode", "preferred"),
    ('[security.sql-tls]\nca = "/ca.pem"', "security.sql-tls.ca", "tls.backend.verify", "ca"),
    ("[security.sql-tls]\nskip-ca = true", "security.sql-tls.skip-ca", "tls.backend.verify", "none"),
    (
        '[security]\nrequire-backend-tls = true\nsql-tls = { ca = "/ca.pem" }',
        "security.require-backend-tls",
        "tls.backend.mode",
        "required",
    ),
    ('[log]\nlevel = "warn"', "log.level", "log.level", "warning"),
    ('[log]\nlevel = "fatal"', "log.level", "log.level", "error"),
    ('[log]\nencoder = "json"', "log.encoder", "log.format", "json"),
    ('[log]\nencoder = "tidb"', "log.encoder", "log.format", "auto"),
    ('[balance]\npolicy = "location"', "balance.policy", "balance.policy", "location"),
    (
        "[balance]\nconn-count = { count-ratio-threshold = 1.2 }",
        "balance.conn-count.count-ratio-threshold",
        "rebalance.threshold",
        0.091,
    ),
    (
        "[balance]\ncpu = { migrations-per-second = 5 }\nmemory = { migrations-per-second = 50.5 }",
        "balance.cpu.migrations-per-second",
        "rebalance.max_per_second",
        50.5,
    ),
    (
        "[balance.status]\nmigrations-per-second = 80",
        "balance.status.migrations-per-second",
        "migration.max_per_second",
        80,
    ),
]


@pytest.mark.parametrize(("toml", "key", "setting", "value"), MAPPED)
def test_maps_a_key(toml: str, key: str, setting: str, value: Any) -> None:
    result = import_tiproxy(toml, "tiproxy.toml")
    assert all(row.outcome is Outcome.MAPPED for row in rows_of(result, key))
    actual: Any = load_settings(result)
    for step in setting.split("."):
        actual = getattr(actual, step)
    assert actual == value
    assert key in result.yaml


def test_documents_each_setting_that_it_sets() -> None:
    """The setting in the table of the documentation is the one that the importer sets."""
    for toml, key, _, _ in MAPPED:
        documented = RULES[key.replace("[0]", "[]")].setting.split(", ")
        for row in rows_of(import_tiproxy(toml, "tiproxy.toml"), key):
            assert row.setting in documented


def test_converts_a_file_in_the_shape_of_the_shipped_one() -> None:
    """The keys and tables of conf/proxy.toml, with other values."""
    result = import_tiproxy(
        """\
workdir = "./tiproxy"
[proxy]
    addr = "0.0.0.0:6000"
    tcp-keep-alive = true
    proxy-protocol = ""
    graceful-wait-before-shutdown = 5
    graceful-close-conn-timeout = 20
    pd-addrs = "10.1.0.1:2379,10.1.0.2:2379"
    max-connections = 2000
    conn-buffer-size = 0
[api]
    enable-basic-auth = false
    user = ""
    password = ""
[log]
    encoder = "tidb"
    [log.log-file]
    filename = "/var/log/tiproxy.log"
    max-size = 100
[security]
    [security.cluster-tls]
    [security.sql-tls]
    skip-ca = true
    [security.server-tls]
    auto-certs = true
[advance]
    ignore-wrong-namespace = true
[balance]
    policy = "resource"
""",
        "tiproxy.toml",
    )
    assert result.unknown_keys == []
    settings = load_settings(result)
    assert settings.pd.urls == ("http://10.1.0.1:2379", "http://10.1.0.2:2379")
    assert (settings.end.wait, settings.end.timeout) == (5, 20)
    assert settings.tls.backend.verify == "none"
    assert settings.tls.client.mode == "disabled"
    assert any("auto-certs" in todo for todo in result.todos)
    assert row_of(result, "log.log-file.filename").outcome is Outcome.NO_EQUIVALENT


def test_names_defaults_that_differ_only_for_keys_that_are_not_set() -> None:
    differing = {each.key for each in import_tiproxy("", "tiproxy.toml").differences}
    assert {"proxy.graceful-close-conn-timeout", "proxy.failover-timeout", "balance.policy"} <= differing
    toml = f'[proxy]\n{PD}graceful-close-conn-timeout = 15\n[balance]\npolicy = "resource"'
    remaining = {each.key for each in import_tiproxy(toml, "tiproxy.toml").differences}
    assert remaining == differing - {
        "proxy.pd-addrs",
        "proxy.graceful-close-conn-timeout",
        "balance.policy",
    }


def test_without_pd_addrs_uses_the_default_of_tiproxy() -> None:
    result = import_tiproxy("", "tiproxy.toml")
    assert load_settings(result).pd.urls == ("http://127.0.0.1:2379",)
    assert "default of proxy.pd-addrs" in result.yaml
    static = import_tiproxy('[proxy]\npd-addrs = ""', "tiproxy.toml")
    assert load_settings(static).pd.urls == ()
    assert any("nodes" in todo for todo in static.todos)


def test_cluster_tls_makes_the_urls_https() -> None:
    toml = (
        '[proxy]\npd-addrs = "a:1"\n[security.cluster-tls]\nca = "/ca.pem"\ncert = "/c.pem"\nkey = "/k.pem"'
    )
    settings = load_settings(import_tiproxy(toml, "tiproxy.toml"))
    assert settings.pd.urls == ("https://a:1",)
    assert settings.health.status.tls
    assert settings.pd.tls == settings.health.status.client_tls
    assert str(settings.pd.tls.cert) == "/c.pem"
    unverified = import_tiproxy(
        '[proxy]\npd-addrs = "a:1"\n[security.cluster-tls]\nskip-ca = true\ncert = "/c.pem"', "tiproxy.toml"
    )
    assert load_settings(unverified).pd.urls == ("https://a:1",)
    assert any("pd.tls.ca" in todo for todo in unverified.todos)
    assert row_of(unverified, "security.cluster-tls.cert").outcome is Outcome.NEEDLESS


@pytest.mark.parametrize(
    ("toml", "client_ca"),
    [
        (f'[security.server-tls]\n{CERT}ca = "/ca.pem"', "/ca.pem"),
        (f'[security.server-tls]\n{CERT}ca = "/ca.pem"\ncert-allowed-cn = ["a"]\nskip-ca = true', "/ca.pem"),
        (f'[security.server-tls]\n{CERT}ca = "/ca.pem"\nskip-ca = true', None),
        ('[security.server-tls]\nca = "/ca.pem"', None),
    ],
)
def test_requires_client_certificates_where_tiproxy_does(toml: str, client_ca: str | None) -> None:
    actual = load_settings(import_tiproxy(toml, "tiproxy.toml")).tls.client.client_ca
    assert (actual and str(actual)) == client_ca


def test_relative_paths_of_envoys_files_are_left_to_the_operator() -> None:
    result = import_tiproxy('[security.server-tls]\ncert = "tls/c.pem"\nkey = "/k.pem"', "tiproxy.toml")
    assert str(load_settings(result).tls.client.cert) == "/etc/tidevoy/c.pem"
    assert "TODO: write the absolute path of tls/c.pem" in result.yaml


def test_does_not_expose_the_api_without_authentication() -> None:
    open_api = import_tiproxy('[api]\naddr = "0.0.0.0:3088"', "tiproxy.toml")
    assert load_settings(open_api).api.listen == "127.0.0.1:3088"
    assert any("0.0.0.0:3088" in todo for todo in open_api.todos)
    tls = '[security.server-http-tls]\ncert = "/c.pem"\nkey = "/k.pem"\nca = "/ca.pem"\n'
    names = 'cert-allowed-cn = ["tidb", "prometheus", "tidb"]\n'
    guarded = import_tiproxy(f'[api]\naddr = "0.0.0.0:3088"\n{tls}{names}', "tiproxy.toml")
    api = load_settings(guarded).api
    assert api.listen == "0.0.0.0:3088"
    assert [(client.name, client.role) for client in api.clients] == [
        ("tidb", "operator"),
        ("prometheus", "operator"),
    ]
    without_names = import_tiproxy(f'[api]\naddr = "0.0.0.0:3088"\n{tls}', "tiproxy.toml")
    assert load_settings(without_names).api.listen == "127.0.0.1:3088"


def test_ports_become_groups_if_they_select_backends() -> None:
    toml = '[proxy]\naddr = "0.0.0.0:6000"\nport-range = [6000, 6002]\n[balance]\nrouting-rule = "port"'
    settings = load_settings(import_tiproxy(toml, "tiproxy.toml"))
    assert settings.sql.listen == "0.0.0.0:6000"
    assert [(each.name, each.listen, each.labels) for each in settings.groups] == [
        ("port-6001", "0.0.0.0:6001", {"tiproxy-port": "6001"}),
        ("port-6002", "0.0.0.0:6002", {"tiproxy-port": "6002"}),
    ]
    all_nodes = import_tiproxy('[proxy]\naddr = "0.0.0.0:6000,0.0.0.0:6001"', "tiproxy.toml")
    assert load_settings(all_nodes).groups == ()
    assert any("0.0.0.0:6001" in todo for todo in all_nodes.todos)


def test_a_label_becomes_a_group() -> None:
    toml = '[balance]\nlabel-name = "app"\n[labels]\napp = "Order Service"\nzone = "east"\nrack = "r1"'
    result = import_tiproxy(toml, "tiproxy.toml")
    (group,) = load_settings(result).groups
    assert (group.name, group.labels) == ("order-service", {"app": "Order Service"})
    assert row_of(result, "labels.app").setting == "groups"
    assert row_of(result, "labels.zone").value == "east"
    assert row_of(result, "labels.rack").outcome is Outcome.NEEDLESS
    assert any("--group order-service" in todo for todo in result.todos)
    assert any("--zone east" in todo for todo in result.todos)


CLUSTERS = """\
[[proxy.backend-clusters]]
name = "one"
pd-addrs = "10.0.0.1:2379"
ns-servers = ["10.0.0.53"]
[[proxy.backend-clusters]]
name = "two"
pd-addrs = "10.0.0.2:2379"
"""


def test_imports_one_of_several_clusters() -> None:
    first = import_tiproxy(f'[proxy]\npd-addrs = "x:1"\n{CLUSTERS}', "tiproxy.toml")
    assert load_settings(first).pd.urls == ("http://10.0.0.1:2379",)
    assert row_of(first, "proxy.pd-addrs").outcome is Outcome.NEEDLESS
    assert "--cluster two" in row_of(first, "proxy.backend-clusters[1].pd-addrs").note
    assert any("0021-one-tidb-cluster" in todo for todo in first.todos)
    second = import_tiproxy(CLUSTERS, "tiproxy.toml", "two")
    assert load_settings(second).pd.urls == ("http://10.0.0.2:2379",)
    with pytest.raises(ConfigError, match=r"there is no cluster three; use one, two"):
        import_tiproxy(CLUSTERS, "tiproxy.toml", "three")


def test_failed_backends_become_drains() -> None:
    toml = '[proxy]\nfailover-timeout = 7\nfail-backend-list = ["10.0.0.1:4000", "tidb-2"]'
    todos = import_tiproxy(toml, "tiproxy.toml").todos
    assert any("`tidevoy drain 10.0.0.1:4000 --deadline 7s --on-deadline close`" in todo for todo in todos)
    assert any("tidb-2" in todo and "`tidevoy drain ADDRESS" in todo for todo in todos)


def test_values_that_tidevoy_rejects_are_left_to_the_operator() -> None:
    result = import_tiproxy("[proxy]\ngraceful-close-conn-timeout = 100000", "tiproxy.toml")
    assert load_settings(result).end.timeout == 30
    row = row_of(result, "proxy.graceful-close-conn-timeout")
    assert row.outcome is Outcome.NO_EQUIVALENT
    assert "0 to 86400" in row.note
    assert any("end.timeout: 100000 is not allowed" in todo for todo in result.todos)


def test_unknown_keys_are_named_without_their_values() -> None:
    toml = '[proxy]\nmax-conections = 5\n[secret-section]\ntoken = "hunter2"\n[labels]\nZone = "a"'
    result = import_tiproxy(toml, "tiproxy.toml")
    assert result.unknown_keys == ["proxy.max-conections", "secret-section.token"]
    assert "hunter2" not in json.dumps(result.as_json())
    assert row_of(result, "labels.Zone").outcome is Outcome.NEEDLESS


def test_keys_are_read_in_any_case() -> None:
    """TiProxy's TOML library does so, too."""
    result = import_tiproxy("[Proxy]\nMax-Connections = 5", "tiproxy.toml")
    assert load_settings(result).sql.max_connections == 5


def test_shows_no_secrets() -> None:
    secrets = [key for key in CURRENT_KEYS + REMOVED_KEYS if key.endswith(("key", "token", "password"))]
    assert "metering.aws.secret-access-key" in secrets
    for key in secrets:
        value = '"/hunter2"' if key.startswith("security.") else '"hunter2"'
        result = import_tiproxy(toml_of(key, value), "tiproxy.toml")
        if row_of(result, key).outcome is not Outcome.MAPPED:  # a path of a key file is no secret
            assert "hunter2" not in json.dumps(result.as_json()), key


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[proxy]\naddr = "a', r"tiproxy.toml:2: this is not TOML \("),
        ("[proxy]\naddr = 5", r"tiproxy.toml:2: proxy.addr: 5 is not text; write text"),
        (
            '[proxy]\n\nmax-connections = "hunter2"',
            r"tiproxy.toml:3: proxy.max-connections: the text is not a",
        ),
        ("[proxy]\nmax-connections = 1.5", r"proxy.max-connections: 1.5 is not a whole number"),
        ("[proxy]\nmax-connections = true", r"true is not a whole number"),
        ("proxy = 5", r"tiproxy.toml:1: proxy: 5 is not a table"),
        ("[[proxy]]", r"proxy: a list is not a table"),
        ("[proxy.backend-clusters]\nname = 'a'", r"proxy.backend-clusters: a mapping is not a table"),
        ("proxy.backend-clusters = [5]", r"proxy.backend-clusters: 5 is not a table"),
        ('[proxy.frontend-keepalive]\nidle = "10"', r'the text is not a duration such as "10s"'),
        ("[security]\nrequire-backend-tls = 1", r"1 is not true or false"),
        ('[proxy]\nport-range = ["a"]', r"a list is not a list of whole numbers"),
        ("a = 1\na = 2", r"tiproxy.toml:2: this is not TOML \(Cannot overwrite"),
        ("x = " + "[" * 5000, r"this is not TOML|nested too deeply"),
    ],
)
def test_reports_invalid_files_with_line_and_key(toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_tiproxy(toml, "tiproxy.toml")


_texts = st.one_of(
    st.sampled_from(["", "/x.pem", "x.pem", "a:1,b:2", ":6000", "0.0.0.0:3080", "v2", "port", "1.3", "1.0"]),
    st.sampled_from(["json", "resource", "zone", "10s"]),
    st.text(max_size=8),
)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "")


_VALUES_BY_KIND: dict[ValueKind, st.SearchStrategy[str]] = {
    ValueKind.TEXT: _texts.map(_quoted),
    ValueKind.INTEGER: st.integers(-5, 10**12).map(str),
    ValueKind.NUMBER: st.floats().map(lambda value: repr(value) if math.isfinite(value) else "nan"),
    ValueKind.BOOLEAN: st.sampled_from(["true", "false"]),
    ValueKind.DURATION: st.sampled_from(['"10s"', '"1h2m"', "0", '"-5s"', '"0.3s"', "9999999999999999"]),
    ValueKind.TEXTS: st.lists(_texts.map(_quoted), max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    ValueKind.INTEGERS: st.lists(st.integers(-3, 70_000), max_size=3).map(str),
    ValueKind.ANY: _texts.map(_quoted),
}
_FUZZED_KEYS = [key for key in RULES if "[]" not in key and key not in ("labels.*", "balance.label.enable")]


@given(st.dictionaries(st.sampled_from(_FUZZED_KEYS), st.data(), max_size=25), st.data())
def test_yaml_always_loads(keys: dict[str, Any], data: st.DataObject) -> None:
    toml = "\n".join(f"{key} = {data.draw(_VALUES_BY_KIND[RULES[key].kind])}" for key in keys)
    result = import_tiproxy(toml, "tiproxy.toml")
    load_settings(result)
    assert {row.key for row in result.rows} >= set(keys)
