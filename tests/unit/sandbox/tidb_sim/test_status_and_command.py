"""The status pages of the simulated server, its built-in answers, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandbox.tidb_sim.builtin_queries import (
    SqlClientInfo,
    answer_builtin,
    normalize_statement,
    select_statement_for,
)
from sandbox.tidb_sim.command import parse_arguments
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.registration import topology_info
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import handle_request as status_answer
from sandbox.tidb_sim.tls import SqlTlsFiles

CLIENT = SqlClientInfo("10.9.9.9:1", "anna", "10.9.%", "TLSv1.3", "TLS_AES_128_GCM_SHA256")
SETTINGS = SimSettings(SessionRules("/run/s"), advertise_address="10.0.0.7")


@pytest.fixture
def node() -> SimNode:
    return SimNode(
        name="10.0.0.7:4000",
        release="v8.5.3",
        server_version=SETTINGS.version,
        labels={"zone": "a"},
        sql_port=4000,
        status_port=10080,
        is_serving=True,
        started_at=1_767_225_600,
        connections=3,
    )


def test_topology_info_matches_tidb(node: SimNode) -> None:
    assert json.loads(topology_info(node, SETTINGS)) == {
        "version": "v8.5.3",
        "git_hash": "simulated",
        "ip": "10.0.0.7",
        "status_port": 10080,
        "deploy_path": "/tidb-server",
        "start_timestamp": 1_767_225_600,
        "labels": {"zone": "a"},
    }


def test_status_reports_connections_and_version(node: SimNode) -> None:
    reply = status_answer("GET", "/status", node, SETTINGS)
    page = json.loads(reply.body)
    assert (reply.code, page["connections"], page["version"]) == (200, 3, "8.0.11-TiDB-v8.5.3")


@pytest.mark.parametrize(("serving", "stopping"), [(False, False), (True, True)])
def test_status_is_500_and_empty_while_starting_and_stopping(
    node: SimNode, serving: bool, stopping: bool
) -> None:
    node.is_serving, node.is_reporting_shutdown = serving, stopping
    reply = status_answer("GET", "/status", node, SETTINGS)
    assert (reply.code, reply.body) == (500, b"")
    assert b"500 Internal Server Error" in reply.encode()


def test_other_paths_respond_like_tidb(node: SimNode) -> None:
    info = json.loads(status_answer("GET", "/info", node, SETTINGS).body)
    assert (info["listening_port"], info["is_owner"]) == (4000, False)
    config = json.loads(status_answer("GET", "/config", node, SETTINGS).body)
    assert config["security"]["session-token-signing-cert"] == ""
    metrics = status_answer("GET", "/metrics", node, SETTINGS).body.decode()
    assert 'tidb_server_connections{resource_group="default"} 3\n' in metrics
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "tidb_server_maxprocs"):
        assert f"\n{name} " in metrics
    assert status_answer("GET", "/nothing", node, SETTINGS).code == 404
    assert status_answer("POST", "/status", node, SETTINGS).code == 405


def test_metrics_report_values_set_by_test(node: SimNode) -> None:
    assert status_answer("POST", "/sim/metrics", node, SETTINGS, b'{"cores": 3}').code == 200
    assert b"\ntidb_server_maxprocs 3.0\n" in status_answer("GET", "/metrics", node, SETTINGS).body
    rejected = status_answer("POST", "/sim/metrics", node, SETTINGS, b'{"cup": 3}')
    assert rejected.encode().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert rejected.body.startswith(b"'cup' is not one of cpu, memory,")
    assert status_answer("GET", "/sim/metrics", node, SETTINGS).code == 404


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"SELECT @@port", 4000),
        (b" select  @@PORT ; \0", 4000),
        (b"select @@hostname", "10.0.0.7:4000"),
        (b"SELECT VERSION()", "8.0.11-TiDB-v8.5.3"),
        (b"select @@version;", "8.0.11-TiDB-v8.5.3"),
        (b"SELECT USER()", "anna@10.9.9.9"),
        (b"select current_user", "anna@10.9.%"),
        (b"show status like 'Ssl_cipher'", "TLS_AES_128_GCM_SHA256"),
        (b"SHOW SESSION STATUS LIKE 'ssl_version'", "TLSv1.3"),
    ],
)
def test_answers_builtin_statements(node: SimNode, text: bytes, value: str | int) -> None:
    row = answer_builtin(normalize_statement(text), node, CLIENT)
    assert row is not None
    assert row[-1][1] == value


def test_builtin_answer_can_be_prepared() -> None:
    row = (("a", 1), ("b()", "it's \\"))
    assert select_statement_for(row) == rb"select 1 as `a`, 'it''s \\' as `b()`"


@pytest.mark.parametrize(
    "text", [b"select 1", b"select @@port, 1", b"set @@port = 1", b"begin", b"show status like 'ssl_%'"]
)
def test_leaves_other_statements_to_mariadb(node: SimNode, text: bytes) -> None:
    assert answer_builtin(normalize_statement(text), node, CLIENT) is None


def test_parses_tidb_command_line(tmp_path: Path) -> None:
    file = tmp_path / "tidb.toml"
    file.write_text(
        """
        graceful-wait-before-shutdown = 12
        mem-quota-query = 1
        [status]
        status-port = 1
        [instance]
        max_connections = 7
        """
    )
    settings = parse_arguments(
        [
            *("-P", "4000", "--status", "10080", "--store=tikv", "--path", "pd0:2379,pd1:2379"),
            *("--advertise-address", "tidb-0", "--host", "0.0.0.0", "--config", str(file)),
            *("--label", "zone=b"),
        ],
        {"TIDB_SIM_MARIADB": "mariadb:3306"},
    )
    assert settings == SimSettings(
        SessionRules("mariadb:3306", 7),
        host="0.0.0.0",
        port=4000,
        status_host="0.0.0.0",
        status_port=10080,
        advertise_address="tidb-0",
        pd=("http://pd0:2379", "http://pd1:2379"),
        labels={"zone": "b"},
        graceful_wait=12,
    )


def test_reads_client_tls_from_file_or_flags(tmp_path: Path) -> None:
    file = tmp_path / "tidb.toml"
    file.write_text('[security]\nssl-cert = "/c"\nssl-key = "/k"\n')
    for arguments in (["--config", str(file)], ["--tls-cert", "/c", "--tls-key", "/k"]):
        rules = parse_arguments([*arguments, "--mariadb", "/run/s"], {}).rules
        assert rules.tls == SqlTlsFiles(Path("/c"), Path("/k"))
    assert parse_arguments(["--mariadb", "/run/s"], {}).rules.tls is None


def test_reads_signing_certificate_from_file_or_flags(tmp_path: Path) -> None:
    file = tmp_path / "tidb.toml"
    file.write_text('[security]\nsession-token-signing-cert = "/c"\nsession-token-signing-key = "/k"\n')
    settings = parse_arguments(["--config", str(file), "--mariadb", "/run/s"], {})
    assert (settings.signing_cert, settings.signing_key) == ("/c", "/k")
    files = ["--session-token-signing-cert", "/d", "--session-token-signing-key", "/l"]
    settings = parse_arguments([*files, "--config", str(file), "--mariadb", "/run/s"], {})
    assert (settings.signing_cert, settings.signing_key) == ("/d", "/l")
    assert parse_arguments(["--mariadb", "/run/s"], {}).signing_key == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--adv", "x"], "unrecognized arguments: --adv"),
        (["-P", "70000"], "70000 is not a port"),
        ([], "MariaDB's address is missing; give --mariadb or set TIDB_SIM_MARIADB"),
        (["--mariadb", "nohost"], "'nohost' has no port"),
        (["--mariadb", "/s", "--label", "zone"], "the label 'zone' is not KEY=VALUE"),
        (["--mariadb", "/s", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--mariadb", "/s", "--tls-key", "/k"], "give both --tls-cert and --tls-key"),
        (["--mariadb", "/s", "--graceful-wait", "long"], "invalid float value: 'long'"),
    ],
)
def test_rejects_invalid_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as rejected:
        parse_arguments(arguments, {})
    assert rejected.value.code == 2
    assert message in capsys.readouterr().err
