"""Import of HAProxy's configuration: whole files and single keywords."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli.importers.haproxy.conversion import import_haproxy
from cli.importers.haproxy.keys import GLOBAL_RULES, PROXY_RULES
from cli.importers.report import ImportResult, Outcome
from controlplane.errors import ConfigError
from tests.support.imports import load_settings, row_of, rows_of

# The shape of the example in TiDB's documentation on HAProxy.
TIDB_GUIDE = """\
global
    log         127.0.0.1 local2            # syslog
    chroot      /var/lib/haproxy
    pidfile     /var/run/haproxy.pid
    maxconn     4096
    nbthread    48
    user        haproxy
    group       haproxy
    daemon
    stats socket /var/lib/haproxy/stats

defaults
    log global
    retries 2
    timeout connect 2s
    timeout client 30000s
    timeout server 30000s

listen admin_stats
    bind 0.0.0.0:8080
    mode http
    option httplog
    maxconn 10
    stats refresh 30s
    stats uri /haproxy
    stats auth admin:hunter2
    stats admin if TRUE

listen tidb-cluster
    bind 0.0.0.0:3390
    mode tcp
    balance leastconn
    server tidb-1 10.9.0.1:4000 check inter 2000 rise 2 fall 3
    server tidb-2 10.9.0.2:4000 check inter 2000 rise 2 fall 3
    server tidb-3 10.9.0.3:4000 check inter 2000 rise 2 fall 3 backup
"""

FRONTEND_AND_BACKEND = """\
global
    nbthread 4
    ca-base /etc/haproxy/ca
    crt-base /etc/haproxy/certs
    ssl-default-bind-options ssl-min-ver TLSv1.3 no-tls-tickets
    hard-stop-after 5m
    maxconnrate 500
    lua-load /etc/haproxy/x.lua
defaults tcp
    mode tcp
    timeout connect 500
    timeout client 1h
    timeout server 2h
    timeout queue 10s
    option clitcpka
    clitcpka-idle 90s
    clitcpka-intvl 5s
    clitcpka-cnt 4
    srvtcpka-idle 1500
frontend mysql from tcp
    bind :3306 ssl crt tidb.pem ca-file clients.pem verify required crl-file clients.crl
    bind [::]:3306 v6only
    maxconn 2000
    rate-limit sessions 300
    acl office src 10.7.0.0/16
    tcp-request connection reject if !office
    use_backend reports if { src 10.8.0.0/16 }
    default_backend tidb
backend tidb from tcp
    balance roundrobin
    option httpchk GET /status
    option redispatch
    default-server check port 10080 inter 3s fall 2 ssl verify none send-proxy-v2 slowstart 30s
    server a tidb-a.example:4000 weight 100
    server b tidb-b.example:4000 weight 200 no-ssl inter 5s
    server c [fd00::3]:4000 weight 0
    server d 10.0.0.4:4000 disabled
    timeout check 2s
backend reports from tcp
    server r 10.0.1.1:4000 check
resolvers dns
    nameserver one 10.0.0.53:53
peers mates
    peer a 10.0.0.1:1024
userlist admins
    user root insecure-password hunter2
"""

PROXY_PROTOCOL = """\
defaults
    timeout client 10m
    timeout server 5m
    timeout tunnel 8h
listen tidb
    bind 10.0.0.9:6000 accept-proxy
    option mysql-check user check
    option tcplog
    server a 10.0.0.1 check inter 5s send-proxy
    server b 10.0.0.2:+1 check send-proxy
    server s /run/mysqld.sock
"""


def convert(text: str, environ: dict[str, str] | None = None, proxy: str | None = None) -> ImportResult:
    return import_haproxy(text, "haproxy.cfg", environ or {}, proxy)


def listen(*lines: str, server: str = "server a 10.0.0.1:4000") -> str:
    return "\n ".join(("listen tidb", "bind :3306", *lines, server))


def value_of(settings: Any, path: str) -> Any:
    for step in path.split("."):
        settings = getattr(settings, step)
    return settings


def test_converts_the_example_of_tidbs_guide() -> None:
    result = convert(TIDB_GUIDE)
    settings = load_settings(result)
    assert settings.sql.listen == "0.0.0.0:3390"
    assert settings.sql.max_connections == 4096
    assert settings.sql.idle_timeout == 30_000
    assert settings.backend.connect_timeout == 2
    assert settings.backend.max_connect_attempts == 3
    assert settings.balance.policy == "connection"
    assert [node.address for node in settings.nodes] == ["10.9.0.1:4000", "10.9.0.2:4000", "10.9.0.3:4000"]
    assert [node.labels for node in settings.nodes] == [{}, {}, {"role": "backup"}]
    assert settings.backup.labels == {"role": "backup"}
    check = settings.health.sql
    assert (check.enabled, check.interval, check.rise, check.fall) == (True, 2, 2, 3)
    assert not settings.health.statement.enabled
    assert result.unknown_keys == []
    assert [todo.partition(":")[0].split(",")[0] for todo in result.todos] == [
        "HAProxy passes the TLS of clients through to TiDB",
        "set pd.urls instead of nodes",
    ]
    assert row_of(result, "listen admin_stats").outcome is Outcome.NEEDLESS
    assert "hunter2" not in json.dumps(result.as_json())
    assert "# global maxconn (line 5)" in result.yaml


def test_converts_a_frontend_with_its_backend() -> None:
    result = convert(FRONTEND_AND_BACKEND)
    settings = load_settings(result)
    assert settings.sql.listen == "0.0.0.0:3306"
    assert settings.sql.max_connections == 2000
    assert settings.sql.idle_timeout == 3600
    assert settings.backend.connect_timeout == 0.5
    assert settings.end.timeout == 300
    assert settings.limits.max_new_connections_per_second == 300
    keepalive = settings.sql
    assert (keepalive.keepalive_idle, keepalive.keepalive_interval, keepalive.keepalive_probes) == (90, 5, 4)
    assert settings.backend.keepalive_idle == 2
    assert settings.backend.proxy_protocol == "v2"
    assert settings.balance.slow_start == 30
    client = settings.tls.client
    assert client.mode == "required"
    assert str(client.cert) == str(client.key) == "/etc/haproxy/certs/tidb.pem"
    assert str(client.client_ca) == "/etc/haproxy/ca/clients.pem"
    assert str(client.crl) == "/etc/haproxy/ca/clients.crl"
    assert client.min_version == "TLSv1.3"
    assert (settings.tls.backend.mode, settings.tls.backend.verify) == ("required", "none")
    nodes = [(node.address, node.status_address, node.weight) for node in settings.nodes]
    assert nodes == [
        ("tidb-a.example:4000", "tidb-a.example:10080", 100),
        ("tidb-b.example:4000", "tidb-b.example:10080", 200),
    ]
    status = settings.health.status
    assert (status.enabled, status.interval, status.fall, status.timeout) == (True, 3, 2, 2)
    assert settings.health.sql.interval == 3
    assert "the most frequent value" in rows_of(result, "server inter")[0].note


def test_says_what_is_left_to_do() -> None:
    todos = "\n".join(convert(FRONTEND_AND_BACKEND).todos)
    for text in (
        "let the clients of [::]:3306 use the address of sql.listen",
        "c has the weight 0: to use it later, run `tidevoy add [fd00::3]:4000`",
        "d is disabled: to use it later, run `tidevoy add 10.0.0.4:4000`",
        "only the servers of tidb are imported; write a group with a port of its own for those of reports",
        "rejects some clients: block them in a firewall",
        "HAProxy expects TLS from the first byte",
    ):
        assert text in todos


def test_other_sections_have_one_line_each() -> None:
    result = convert(FRONTEND_AND_BACKEND)
    for key in ("backend reports", "resolvers dns", "peers mates", "userlist admins"):
        assert row_of(result, key).outcome is Outcome.NO_EQUIVALENT
    assert "hunter2" not in json.dumps(result.as_json())


def test_converts_proxy_headers_and_ports_of_clients() -> None:
    result = convert(PROXY_PROTOCOL)
    settings = load_settings(result)
    assert settings.sql.proxy_protocol == "required"
    assert settings.sql.trusted_proxies == ("0.0.0.0/0", "::/0")
    assert any("networks of your proxies" in todo for todo in result.todos)
    assert settings.backend.proxy_protocol == "v1"
    assert [node.address for node in settings.nodes] == ["10.0.0.1:6000", "10.0.0.2:6001"]
    assert row_of(result, "server s").outcome is Outcome.NO_EQUIVALENT
    assert settings.sql.idle_timeout == 8 * 3600
    assert row_of(result, "timeout client").outcome is Outcome.NEEDLESS
    statement = settings.health.statement
    assert (statement.enabled, statement.user, statement.interval) == (True, "check", 5)


@pytest.mark.parametrize(
    ("condition", "networks", "needs_todo"),
    [
        ("if { src 10.0.0.0/8 192.0.2.7 }", ("10.0.0.0/8", "192.0.2.7/32"), False),
        ("if { src 10.1.2.3/8 }", ("10.0.0.0/8",), False),
        ("if office", ("127.0.0.1/32",), True),
        ("if { src -f /etc/networks }", ("127.0.0.1/32",), True),
    ],
)
def test_expect_proxy_names_the_trusted_proxies(
    condition: str, networks: tuple[str, ...], needs_todo: bool
) -> None:
    result = convert(listen(f"tcp-request connection expect-proxy layer4 {condition}"))
    settings = load_settings(result)
    assert (settings.sql.proxy_protocol, settings.sql.trusted_proxies) == ("optional", networks)
    assert any("was not understood" in todo for todo in result.todos) == needs_todo


# Lines of a `listen` section, the key of the row, the setting, and its value.
MAPPED: list[tuple[str, str, str, Any]] = [
    ("maxconn 7", "maxconn", "sql.max_connections", 7),
    ("timeout connect 3s", "timeout connect", "backend.connect_timeout", 3),
    ("contimeout 3000", "contimeout", "backend.connect_timeout", 3),
    ("timeout client 60s", "timeout client", "sql.idle_timeout", 60),
    ("timeout server 60s", "timeout server", "sql.idle_timeout", 60),
    ("timeout tunnel 60s", "timeout tunnel", "sql.idle_timeout", 60),
    ("clitimeout 60000", "clitimeout", "sql.idle_timeout", 60),
    ("srvtimeout 60000", "srvtimeout", "sql.idle_timeout", 60),
    ("balance static-rr", "balance", "balance.policy", "connection"),
    ("balance random(2)", "balance", "balance.policy", "connection"),
    ("retries 0", "retries", "backend.max_connect_attempts", 1),
    ("retries 99", "retries", "backend.max_connect_attempts", 20),
    ("rate-limit sessions 9", "rate-limit sessions", "limits.max_new_connections_per_second", 9),
    ("clitcpka-idle 30s", "clitcpka-idle", "sql.keepalive_idle", 30),
    ("clitcpka-intvl 3s", "clitcpka-intvl", "sql.keepalive_interval", 3),
    ("clitcpka-cnt 3", "clitcpka-cnt", "sql.keepalive_probes", 3),
    ("srvtcpka-idle 30s", "srvtcpka-idle", "backend.keepalive_idle", 30),
    ("srvtcpka-intvl 3s", "srvtcpka-intvl", "backend.keepalive_interval", 3),
    ("srvtcpka-cnt 3", "srvtcpka-cnt", "backend.keepalive_probes", 3),
]


@pytest.mark.parametrize(("line", "key", "setting", "value"), MAPPED)
def test_maps_a_keyword(line: str, key: str, setting: str, value: Any) -> None:
    result = convert(listen(line))
    row = row_of(result, key)
    assert (row.outcome, row.setting, row.line) == (Outcome.MAPPED, setting, 3)
    assert row.setting in PROXY_RULES[key].setting.split(", ")
    assert value_of(load_settings(result), setting) == value


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("maxconn 50", "sql.max_connections", 50),
        ("hard-stop-after 30s", "end.timeout", 30),
        ("grace 10s", "end.wait", 10),
        ("maxsessrate 80", "limits.max_new_connections_per_second", 80),
    ],
)
def test_maps_a_keyword_of_global(line: str, setting: str, value: Any) -> None:
    result = convert(f"global\n {line}\n{listen()}")
    keyword = line.split()[0]
    assert row_of(result, f"global {keyword}").setting == GLOBAL_RULES[keyword].setting == setting
    assert value_of(load_settings(result), setting) == value


@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        ("check", "health.sql.enabled", True),
        ("check inter 500", "health.sql.interval", 0.5),
        ("check rise 4 fall 5", "health.sql.fall", 5),
        ("slowstart 1m", "balance.slow_start", 60),
        ("send-proxy", "backend.proxy_protocol", "v1"),
        ("send-proxy-v2-ssl-cn", "backend.proxy_protocol", "v2"),
        ("ssl ca-file /ca.pem", "tls.backend.verify", "ca"),
        ("ssl ca-file /ca.pem verify required sni str(x)", "tls.backend.verify", "full"),
        ("ssl ca-file /ca.pem verifyhost tidb", "tls.backend.verify", "full"),
        ("ssl verify none ca-file /ca.pem", "tls.backend.ca", None),
        ("ssl ca-file @system-ca", "tls.backend.ca", None),
        ("ssl ca-file /ca.pem ssl-min-ver TLSv1.3", "tls.backend.min_version", "TLSv1.3"),
        ("ssl ca-file /ca.pem ssl-min-ver TLSv1.0", "tls.backend.min_version", "TLSv1.2"),
    ],
)
def test_maps_an_option_of_a_server(options: str, setting: str, value: Any) -> None:
    result = convert(listen(server=f"server a 10.0.0.1:4000 {options}"))
    assert value_of(load_settings(result), setting) == value
    assert result.unknown_keys == []


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (["", ""], [100, 100]),
        (["weight 1", "weight 2"], [100, 200]),
        (["weight 10", "weight 10", "weight 30"], [100, 100, 300]),
        (["weight 2", "", ""], [200, 100, 100]),
        (["weight 1", "weight 1", "weight 256"], [39, 39, 10_000]),
    ],
)
def test_scales_weights(weights: list[str], expected: list[int]) -> None:
    servers = "\n ".join(
        f"server s{index} 10.0.0.{index + 1}:4000 {weight}" for index, weight in enumerate(weights)
    )
    assert [node.weight for node in load_settings(convert(listen(server=servers))).nodes] == expected


def test_the_lowest_limit_counts() -> None:
    text = "global\n maxconn 100\nlisten tidb\n bind :3306 maxconn 90\n maxconn 95\n server a 10.0.0.1:4000"
    result = convert(text)
    assert load_settings(result).sql.max_connections == 90
    assert row_of(result, "bind maxconn").outcome is Outcome.MAPPED
    assert {row_of(result, key).outcome for key in ("maxconn", "global maxconn")} == {Outcome.NEEDLESS}


def test_a_high_limit_raises_the_one_that_protects_the_envoy() -> None:
    settings = load_settings(convert(listen("maxconn 60000")))
    assert (settings.sql.max_connections, settings.overload.max_connections) == (60_000, 66_000)


def test_a_server_without_check_keeps_tidevoys_checks() -> None:
    result = convert(listen("option mysql-check user x", server="server a 10.0.0.1:4000 inter 5s"))
    settings = load_settings(result)
    assert not settings.health.statement.enabled
    assert settings.health.sql.interval == 1
    assert row_of(result, "option mysql-check").outcome is Outcome.NEEDLESS
    assert row_of(result, "server inter").outcome is Outcome.NEEDLESS


def test_http_checks_need_a_port() -> None:
    server = "server a 10.0.0.1:4000 check"
    without = convert(listen("option httpchk GET /status", server=server))
    assert row_of(without, "option httpchk").outcome is Outcome.NO_EQUIVALENT
    connect = listen("option httpchk", "http-check connect port 10080", server=f"{server} check-ssl")
    settings = load_settings(convert(connect))
    assert settings.nodes[0].status_address == "10.0.0.1:10080"
    assert settings.health.status.tls


def test_other_ports_of_plain_checks_have_no_equivalent() -> None:
    result = convert(listen(server="server a 10.0.0.1:4000 check port 10080 addr 10.0.0.9 check-ssl"))
    assert load_settings(result).nodes[0].status_address is None
    for option in ("port", "addr", "check-ssl"):
        assert row_of(result, f"server {option}").outcome is Outcome.NO_EQUIVALENT


def test_options_of_some_servers_apply_to_all_nodes() -> None:
    servers = "server a b:1 ssl ca-file /ca.pem send-proxy\n server c d:1\n server e f:1 disabled"
    todos = convert(listen(server=servers)).todos
    assert any("all nodes get TLS, also c, which had none" in todo for todo in todos)
    assert any("all nodes get PROXY headers, also c, which had none" in todo for todo in todos)


def test_a_reverted_option_selects_no_check() -> None:
    proxy = listen("no option mysql-check", server="server a b:1 check")
    result = convert(f"defaults\n option mysql-check user x\n{proxy}")
    assert not load_settings(result).health.statement.enabled
    assert row_of(result, "no option mysql-check").outcome is Outcome.NEEDLESS


def test_tls_without_a_usable_certificate_is_not_dropped() -> None:
    result = convert(listen().replace(":3306", ":3306 ssl crt /etc/certs/"))
    client = load_settings(result).tls.client
    assert (client.mode, str(client.cert)) == ("required", "/etc/tidevoy/server.pem")
    assert any("name the certificate" in todo for todo in result.todos)


def test_a_later_statement_takes_the_place_of_an_earlier_one() -> None:
    result = convert(f"defaults\n retries 5\n{listen('retries 1')}")
    assert load_settings(result).backend.max_connect_attempts == 2
    earlier = next(row for row in rows_of(result, "retries") if row.line == 2)
    assert (earlier.outcome, earlier.note) == (Outcome.NEEDLESS, "line 5 takes its place")


def test_reads_variables_from_the_environment() -> None:
    text = listen('maxconn "${LIMIT-5}"', server='server a "${TIDB_HOST}:${PORT-4000}"')
    settings = load_settings(convert(text, {"TIDB_HOST": "10.0.0.7"}))
    assert settings.nodes[0].address == "10.0.0.7:4000"
    assert settings.sql.max_connections == 5


def test_remarks_stand_in_the_yaml() -> None:
    result = convert(listen('log "$SYSLOG" local0'))
    assert "# line 3: the environment variable SYSLOG is not set, and is read as empty" in result.yaml


def test_names_defaults_that_differ_only_for_keywords_that_are_not_there() -> None:
    differing = {each.key for each in convert(listen()).differences}
    assert {"timeout connect", "balance", "server check", "hard-stop-after", "option tcpka"} <= differing
    remaining = {each.key for each in convert(TIDB_GUIDE).differences}
    assert remaining == {
        *("server slowstart", "option tcpka", "hard-stop-after", "server on-marked-down"),
        *("(TLS of clients)", "(compression)"),
    }


SEVERAL = """\
listen one
 bind :1000
 server a 10.0.0.1:5000
listen two
 bind :2000
 server a 10.0.0.2:5000
listen web
 mode http
 bind :80
 server a 10.0.0.3:80
listen off
 disabled
 bind :3306
 server a 10.0.0.4:4000
"""


def test_chooses_the_proxy_for_mysql() -> None:
    with pytest.raises(ConfigError, match=r"several proxies .*; choose one with --proxy: one, two$"):
        convert(SEVERAL)
    assert load_settings(convert(SEVERAL, proxy="two")).nodes[0].address == "10.0.0.2:5000"
    with pytest.raises(ConfigError, match=r"there is no proxy web in TCP mode with servers"):
        convert(SEVERAL, proxy="web")
    for mysql in ("listen tidb-x\n bind :3\n server a b:1", "listen x\n bind :3\n server a b:4000"):
        assert load_settings(convert(f"{SEVERAL}{mysql}")).sql.listen == "0.0.0.0:3"
    with pytest.raises(ConfigError, match="there is no proxy in TCP mode with servers"):
        convert("frontend f\n bind :1\n default_backend none")
    assert load_settings(convert(FRONTEND_AND_BACKEND, proxy="tidb")).sql.max_connections == 2000


def test_unknown_keywords_are_named_without_their_values() -> None:
    text = listen("frobnicate hunter2", server="server a 10.0.0.1:4000 frob hunter2 check")
    result = convert(f"global\n frobnicate hunter2\n{text}")
    assert result.unknown_keys == ["server frob", "global frobnicate", "frobnicate"]
    assert "hunter2" not in json.dumps(result.as_json())
    assert load_settings(result).health.sql.enabled
    option = convert(listen("option frobnicate"))
    assert option.unknown_keys == ["option frobnicate"]
    assert convert(listen().replace(":3306", ":3306 frob x")).unknown_keys == ["bind frob"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("maxconn", r"haproxy.cfg:3: maxconn: the value is missing"),
        ("maxconn many", r"haproxy.cfg:3: maxconn: 'many' is not a whole number; write a whole number"),
        ("timeout connect 5x", r"haproxy.cfg:3: timeout connect: '5x' is not a time"),
        ("bind :x", r"haproxy.cfg:3: bind: 'x' in ':x' is not a port"),
        ("server b", r"haproxy.cfg:3: server b: the value is missing"),
        ("server b 10.0.0.1:4000 check inter x", r"haproxy.cfg:3: server inter: 'x' is not a time"),
        ("log 'x", r"haproxy.cfg:3: a quote"),
    ],
)
def test_reports_invalid_values_with_line_and_key(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(listen(line))


@pytest.mark.parametrize("text", [TIDB_GUIDE, FRONTEND_AND_BACKEND, PROXY_PROTOCOL])
def test_no_line_of_the_proxy_is_dropped(text: str) -> None:
    """Each line of `global`, of the proxy and of its defaults has a row; each other section has one."""
    result = convert(text)
    lines = {row.line for row in result.rows}
    other = False
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words and not line.startswith(" "):
            other = words[0] not in ("global", "defaults") and words[1] not in (
                "tidb-cluster",
                "mysql",
                "tidb",
            )
            assert not other or number in lines, line
        elif words and not other:
            assert number in lines, line
