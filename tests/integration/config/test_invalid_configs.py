"""The commands report each invalid setting in one line, with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme

from cli.main import run
from sandbox.ports import Ports
from tests.support.controlplane.invalid_configs import CHECKED_BY_SERVE, INVALID_CONFIGS

TIDEVOY = Path(sys.executable).with_name("tidevoy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of INVALID_CONFIGS, and the certificates that they name."""
    folder = tmp_path_factory.mktemp("bad-config")
    for name, case in INVALID_CONFIGS.items():
        raw = case.text if isinstance(case.text, bytes) else case.text.encode()
        (folder / f"{name}.yaml").write_bytes(raw)
    authority = trustme.CA()
    good, other = authority.issue_cert("good.test"), authority.issue_cert("other.test")
    (folder / "good.pem").write_bytes(good.cert_chain_pems[0].bytes())
    (folder / "good.key").write_bytes(good.private_key_pem.bytes())
    (folder / "other.key").write_bytes(other.private_key_pem.bytes())
    (folder / "bad.pem").write_text("this is no certificate\n")
    encrypt = ["openssl", "pkey", "-in", "good.key", "-aes256", "-passout", "pass:x", "-out", "encrypted.key"]
    subprocess.run(encrypt, cwd=folder, check=True)
    return folder


Run = subprocess.CompletedProcess[str]


def run_command(folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Run:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    return subprocess.run(
        [TIDEVOY, *arguments],
        cwd=folder,
        env={**clean, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def error_lines(result: Run) -> tuple[str, ...]:
    return tuple(result.stderr.splitlines())


def expected_lines(name: str) -> tuple[str, ...]:
    lines = (
        f"{name}.yaml{line[1:]}" if line.startswith("F:") else line
        for line in INVALID_CONFIGS[name].expected_lines
    )
    return tuple(f"tidevoy: {line}" for line in lines)


@pytest.mark.parametrize("name", INVALID_CONFIGS)
def test_config_check_reports_problems(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the command in this process, because a process per file would take a minute of CPU time."""
    monkeypatch.chdir(folder)
    for variable in [variable for variable in os.environ if variable.startswith("TIDEVOY_")]:
        monkeypatch.delenv(variable)
    for variable, value in INVALID_CONFIGS[name].environ.items():
        monkeypatch.setenv(variable, value)
    exit_code = run(["config", "check", f"{name}.yaml"])
    output = capsys.readouterr()
    assert (tuple(output.err.splitlines()), output.out, exit_code) == (expected_lines(name), "", 2)


@pytest.mark.parametrize("name", CHECKED_BY_SERVE)
def test_serve_reports_problems_and_does_not_start(name: str, folder: Path) -> None:
    result = run_command(folder, "serve", "--config", f"{name}.yaml", environ=INVALID_CONFIGS[name].environ)
    assert (error_lines(result), result.stdout, result.returncode) == (expected_lines(name), "", 2)


@pytest.mark.parametrize("arguments", [("config", "check"), ("serve", "--config")])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.yaml", "No such file or directory"),
        (".", "Is a directory"),
    ],
)
def test_reports_missing_file_and_directory(
    arguments: tuple[str, ...], path: str, reason: str, folder: Path
) -> None:
    result = run_command(folder, *arguments, path)
    line = f"tidevoy: {path}: the file cannot be read: {reason}; name a settings file that Tidevoy can read"
    assert (error_lines(result), result.returncode) == ((line,), 2)


def test_reports_unusable_state_directory(folder: Path, ports: Ports) -> None:
    (folder / "blocked.yaml").write_text(
        "state_dir: good.pem/state\nxds: {listen: 127.0.0.1:0}\n"
        f"api: {{listen: 127.0.0.1:{ports.allocate()}}}\n"
    )
    result = run_command(folder, "serve", "--config", "blocked.yaml")
    problem = "good.pem/state cannot be created: Not a directory"
    remedy = "give Tidevoy's user read and write access to it, or set another state_dir"
    assert f"tidevoy: good.pem/state: state_dir: {problem}; {remedy}" in error_lines(result)
    assert result.returncode == 2


def test_accepts_valid_file(folder: Path) -> None:
    (folder / "fine.yaml").write_text(
        "pd: {urls: [http://10.0.0.1:2379]}\nsql: {proxy_protocol: off}\nxds:\n  listen: 0.0.0.0:18000\n"
        "  tls: {cert: good.pem, key: good.key, client_ca: good.pem}\nbackend:\nlog:\n  level:\n"
    )
    result = run_command(folder, "config", "check", "fine.yaml", environ={"TIDEVOY_LOG__FORMAT": "json"})
    assert (result.stderr, result.returncode) == ("", 0)


def test_reports_problems_as_json(folder: Path) -> None:
    result = run_command(folder, "config", "check", "--json", "several.yaml")
    assert (result.stderr, result.returncode) == ("", 2)
    assert json.loads(result.stdout) == [
        {
            "where": "several.yaml:5",
            "key": "health.sql.rise",
            "problem": "'x' is not allowed",
            "remedy": "write a whole number from 1 to 100",
        },
        {
            "where": "several.yaml:2",
            "key": "log.level",
            "problem": "'loud' is not allowed",
            "remedy": "write one of debug, info, warning, error",
        },
    ]
    absent = run_command(folder, "config", "check", "--json", "absent.yaml")
    assert ([error["where"] for error in json.loads(absent.stdout)], absent.returncode) == (
        ["absent.yaml"],
        2,
    )
    (folder / "empty.yaml").write_text("")
    empty = run_command(folder, "config", "check", "--json", "empty.yaml")
    assert (json.loads(empty.stdout), empty.stderr, empty.returncode) == ([], "", 0)
