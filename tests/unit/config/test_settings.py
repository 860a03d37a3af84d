"""Settings from a file and the environment: precedence, and validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.config import schema
from controlplane.config.loader import ENV_PREFIX, read_settings, startup_warnings
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings
from controlplane.config.yaml_loader import parse_yaml
from controlplane.errors import ConfigError, ConfigErrors
from tests.support.controlplane.setting_values import NON_DEFAULTS, PAIRED, nested

LEAVES = list(schema.iter_settings(Settings))
DOCS = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "tidevoy.yaml"


def read_error(path: Path | None, environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        read_settings(path, environ)
    return str(error.value)


# --- sources ---


def test_defaults_need_no_file() -> None:
    assert read_settings(None, {}) == Settings()


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "pd:\nsql:\n  listen:\nxds: {tls: }\nnodes: ~\n", "\ufeff"]
)
def test_empty_values_mean_defaults(text: str, config_file: Path) -> None:
    config_file.write_text(text, encoding="utf-8")
    assert read_settings(config_file, {}) == Settings()


def test_reads_every_setting_from_file(config_file: Path) -> None:
    assert NON_DEFAULTS.keys() == {format_path(path) for path, _ in LEAVES}
    # `read_settings` would read the certificate files, which do not exist.
    config_file.write_text(yaml.safe_dump(nested(NON_DEFAULTS)))
    data, _ = parse_yaml(config_file.read_text(), "F")
    masked = nested(NON_DEFAULTS)
    masked["api"]["tokens"] = [{**token, "sha256": "**********"} for token in NON_DEFAULTS["api.tokens"]]
    assert Settings.model_validate(data).model_dump(mode="json") == masked


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, _ in LEAVES
        if path[-1] not in PAIRED
        and format_path(path)
        not in ("tls.client.mode", "replicas.enabled", "sql.proxy_protocol", "health.statement.enabled")
    ],
    ids=format_path,
)
def test_reads_every_setting_from_variable(path: schema.SettingPath) -> None:
    name = format_path(path)
    value = NON_DEFAULTS[name]
    text = (
        ",".join(value)
        if name == "pd.urls"
        else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
    )
    if name == "nodes":
        text = '[{"address": "tidb-0:4000", "weight": 5, "labels": {"zone": "a"}}]'
    lists = {"groups", "api.tokens", "api.host_names", "api.trusted_proxies", "sql.trusted_proxies"}
    lists |= {"sql.login_limits.shared_addresses", "limits.rules", "statements.rules"}
    if name in lists or isinstance(value, dict):
        text = json.dumps(value)
    settings = read_settings(None, {ENV_PREFIX + name.upper().replace(".", "__"): text.strip("'\"")})
    assert settings == Settings.model_validate(nested({name: value}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "url",
            "10.0.0.9:9090",
            "'10.0.0.9:9090' is not an http:// or https:// URL; write a URL without",
        ),
        ("url", "http://:9090", "'http://:9090' is not an http:// or https:// URL; write a URL"),
        ("url", "http://p:70000", "'http://p:70000' is not an http:// or https:// URL; write a URL"),
        (
            "url",
            "http://me:secret@p",
            "the URL contains a user; remove the part before the @",
        ),
        (
            "url",
            "http://p/api?x=1",
            "the URL has a query or a fragment; remove it",
        ),
        (
            "instance_label",
            "tidb-node",
            "'tidb-node' is not allowed; write a name of letters, digits",
        ),
        ("instance_label", "9", "'9' is not allowed; write a name of letters, digits"),
        (
            "ca",
            "/nowhere/ca.pem",
            "/nowhere/ca.pem cannot be read: No such file or directory; name a PEM file",
        ),
    ],
)
def test_rejects_invalid_prometheus_settings(key: str, value: str, message: str) -> None:
    variable = f"TIDEVOY_BALANCE__PROMETHEUS__{key.upper()}"
    assert read_error(None, {variable: value}).startswith(f"{variable}: balance.prometheus.{key}: {message}")


def test_environment_takes_precedence_over_file(config_file: Path) -> None:
    config_file.write_text("health: {sql: {rise: 3, fall: 4}}\n")
    settings = read_settings(config_file, {"TIDEVOY_HEALTH__SQL__RISE": "5", "TIDEVOY_LOG__LEVEL": ""})
    assert (settings.health.sql.rise, settings.health.sql.fall) == (5, 4)
    assert settings.log.level == "info"


def test_list_variables_accept_commas_or_json() -> None:
    commas = read_settings(None, {"TIDEVOY_PD__URLS": " http://a:1 , http://b:2/"})
    as_json = read_settings(None, {"TIDEVOY_PD__URLS": '["http://a:1", "http://b:2"]'})
    assert commas.pd.urls == as_json.pd.urls == ("http://a:1", "http://b:2")


def test_ignores_foreign_variables() -> None:
    others = {
        "TIDEVOY_URL": "http://127.0.0.1:3080",
        "TIDEVOY_CONFIG": "/etc/tidevoy.yaml",
        "TIDEVOY_SERVICE_HOST": "10.0.0.1",
        "TIDEVOY_SERVICE_PORT_GRPC": "18000",
        "TIDEVOY_PORT": "tcp://10.0.0.1:3080",
        "TIDEVOY_API_PORT_3080_TCP_ADDR": "10.0.0.1",
        "TIDEVOYX": "1",
        "PATH": "/bin",
    }
    assert read_settings(None, others) == Settings()


def test_rejects_port_variable_not_set_by_kubernetes() -> None:
    assert read_error(None, {"TIDEVOY_PORT": "6000"}).startswith(
        "TIDEVOY_PORT: no setting has this name; did you"
    )


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("off", "off"), ("no", "no"), ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("010", "010"),
        ("true", True), ("7", 7), ("-7", -7), ("0x10", 16), ("1e3", 1000.0), (".5", 0.5), ("5.", 5.0),
        ("~", None), ("", None), ("null", None),
    ],
)  # fmt: skip
def test_reads_scalars_of_yaml_1_2(scalar: str, value: object) -> None:
    read = parse_yaml(f"a: {scalar}\n", "F")[0]["a"]
    assert (read, type(read)) == (value, type(value))


def test_reads_merge_keys_and_anchors() -> None:
    data, lines = parse_yaml("a: &x {p: 1, q: 1}\nb:\n  <<: *x\n  q: 2\n", "F")
    assert data["b"] == {"p": 1, "q": 2}
    assert lines["b", "q"] == 4


def test_reports_several_errors_together(config_file: Path) -> None:
    config_file.write_text("log: {level: loud}\nsql: {listen: x}\n")
    with pytest.raises(ConfigErrors) as error:
        read_settings(config_file, {})
    assert len(str(error.value).splitlines()) == 2
    assert error.value.key == error.value.errors[0].key == "sql.listen"


def test_error_messages_are_single_lines(config_file: Path) -> None:
    config_file.write_text(
        'sql: {listen: ":a\\nb"}\nlog: {level: "a\\nb\\u2028c"}\nstate_dir: !!set {a, b}\n"x\\ny": 1\n'
    )
    assert len(read_error(config_file, {}).splitlines()) == 4


def test_error_does_not_show_password_of_url() -> None:
    assert "hunter2" not in read_error(None, {"TIDEVOY_PD__URLS": "http://root:hunter2@pd:2379"})


@pytest.mark.parametrize("tokens", ["tvy_secret", "[tvy_secret]", "{name: tvy_secret}"])
def test_error_does_not_show_secret_in_the_wrong_place(config_file: Path, tokens: str) -> None:
    config_file.write_text(f"api: {{tokens: {tokens}}}\n")
    with pytest.raises(ConfigError, match="tokens") as error:
        read_settings(config_file, {})
    assert "tvy_secret" not in str(error.value)


def test_missing_secret_is_called_missing(config_file: Path) -> None:
    config_file.write_text("api: {tokens: [{name: a, role: viewer}]}\n")
    with pytest.raises(ConfigError, match="sha256: is missing"):
        read_settings(config_file, {})


def test_error_does_not_show_secret_of_another_type(config_file: Path) -> None:
    config_file.write_text("api: {tokens: [{name: a, role: viewer, sha256: 4711}]}\n")
    expected = "1: api.tokens.0.sha256: the value is not allowed; put it in quotes"
    assert read_error(config_file, {}) == f"{config_file}:{expected}"


def test_envoy_listens_on_no_random_port() -> None:
    message = read_error(None, {"TIDEVOY_SQL__LISTEN": "0.0.0.0:0"})
    assert "the port of '0.0.0.0:0' is not a number from 1 to 65535" in message


# --- rules between settings ---


@pytest.mark.parametrize("listen", ["127.0.0.1:3080", "127.8.9.1:3080", "[::1]:3080", "localhost:3080"])
def test_loopback_needs_no_authentication(listen: str) -> None:
    assert Settings.model_validate({"api": {"listen": listen}}).api.listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:3080", "[::]:3080", "10.0.0.1:3080", "lb.example:3080"])
def test_other_addresses_need_authentication(listen: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other machines"):
        Settings.model_validate({"api": {"listen": listen}})
    assert (
        Settings.model_validate({"api": {"listen": listen}, "allow_unauthenticated": True}).api.listen
        == listen
    )


@pytest.mark.parametrize(
    ("client_tls", "backend_tls", "proxy_protocol", "requirement"),
    [
        ("disabled", "disabled", "required", ""),
        ("required", "disabled", "off", "tls.client.mode is set to required"),
        ("disabled", "disabled", "optional", "sql.proxy_protocol is set to optional"),
        (
            "required",
            "required",
            "optional",
            "tls.client.mode is set to required and tls.backend.mode is set to required"
            " and sql.proxy_protocol is set to optional",
        ),
    ],
)
def test_module_requirement_names_its_settings(
    client_tls: str, backend_tls: str, proxy_protocol: str, requirement: str
) -> None:
    client = {"mode": client_tls, "cert": "/c", "key": "/k"} if client_tls != "disabled" else {}
    tls = {"client": client, "backend": {"mode": backend_tls}}
    sql = {"proxy_protocol": proxy_protocol, "trusted_proxies": ["10.0.0.0/8"]}
    assert Settings.model_validate({"tls": tls, "sql": sql}).module_requirement == requirement


def test_xds_with_client_ca_may_listen_anywhere() -> None:
    tls = {"cert": "c", "key": "k"}
    with pytest.raises(ValueError, match="can be reached from other machines"):
        Settings.model_validate({"xds": {"listen": "0.0.0.0:18000", "tls": tls}})
    settings = Settings.model_validate({"xds": {"listen": "0.0.0.0:18000", "tls": {**tls, "client_ca": "a"}}})
    assert settings.xds.listen == "0.0.0.0:18000"


@pytest.mark.parametrize(
    ("sql", "api", "is_conflict"),
    [
        ("0.0.0.0:3080", "127.0.0.1:3080", True),
        ("127.0.0.1:3080", "127.0.0.1:3080", True),
        ("[::]:3080", "127.0.0.1:3080", True),
        ("10.0.0.1:3080", "127.0.0.1:3080", False),
        ("0.0.0.0:3081", "127.0.0.1:3080", False),
    ],
)
def test_rejects_listeners_on_same_port(sql: str, api: str, is_conflict: bool) -> None:
    data = {"sql": {"listen": sql}, "api": {"listen": api}}
    if is_conflict:
        with pytest.raises(ValueError, match="have the same port"):
            Settings.model_validate(data)
    else:
        Settings.model_validate(data)


GROUP = {"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, "olap is listed twice; give each group its own name"),
        ({"name": "fast"}, r"groups\.1\.listen and groups\.0\.listen .* have the same port"),
        (
            {"name": "fast", "listen": "10.0.0.1:6000"},
            r"groups\.1\.listen and sql\.listen .* have the same port",
        ),
        ({"name": "Fast"}, r"groups\.1\.name\s+String should match pattern"),
        ({"name": "f" * 33}, r"groups\.1\.name\s+String should match pattern"),
        ({"name": "fast", "labels": {}}, "should have at least 1 item"),
        ({"name": "fast", "listen": "host:6002"}, "Envoy listens on IP addresses only"),
    ],
)
def test_rejects_invalid_groups(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Settings.model_validate({"groups": [GROUP, {**GROUP, **change}]})


def test_states_budget_is_at_least_four_times_the_maximum() -> None:
    def migration(**values: int) -> Settings:
        return Settings.model_validate({"migration": values})

    assert migration(max_state_bytes=65_536, max_total_state_bytes=262_144)
    with pytest.raises(ValueError, match=r"is less than four times max_state_bytes \(4194304\)"):
        migration(max_total_state_bytes=16_777_215)
    assert migration(max_state_bytes=67_108_864), "the largest value fits into the default budget"


def test_port_0_conflicts_with_no_listener() -> None:
    assert Settings.model_validate({"xds": {"listen": "[::1]:0"}}).xds.listen == "[::1]:0"


def test_startup_warnings() -> None:
    assert [warning.split(" ")[0] for warning in startup_warnings(Settings())] == ["pd.urls"]
    insecure = {
        "nodes": [{"address": "a:1"}],
        "allow_unauthenticated": True,
        "health": {"sql": {"enabled": False}, "status": {"enabled": False}},
    }
    assert [warning.split(" ")[0] for warning in startup_warnings(Settings.model_validate(insecure))] == [
        "allow_unauthenticated",
        "all",
    ]
