"""Every configuration that cannot be used is told in one line each, by the real command, with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from sandbox.ports import Ports
from tests.support.controlplane.invalid_configs import CHECKED_BY_SERVE, INVALID_CONFIGS

TIDEVOY = Path(sys.executable).with_name("tidevoy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the table, and certificates that they name."""
    folder = tmp_path_factory.mktemp("bad-config")
    for name, bad in INVALID_CONFIGS.items():
        raw = bad.text if isinstance(bad.text, bytes) else bad.text.encode()
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


def command(folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Run:
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


@pytest.fixture(scope="module")
def checked(folder: Path) -> Iterator[Mapping[str, Future[Run]]]:
    """The real command on every file of the table, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(command, folder, "config", "check", f"{name}.yaml", environ=bad.environ)
            for name, bad in INVALID_CONFIGS.items()
        }


def told(run: Run) -> tuple[str, ...]:
    return tuple(run.stderr.splitlines())


def expected(name: str) -> tuple[str, ...]:
    says = (
        f"{name}.yaml{line[1:]}" if line.startswith("F:") else line
        for line in INVALID_CONFIGS[name].expected_lines
    )
    return tuple(f"tidevoy: {line}" for line in says)


@pytest.mark.parametrize("name", INVALID_CONFIGS)
def test_check_tells_what_is_wrong(name: str, checked: Mapping[str, Future[Run]]) -> None:
    run = checked[name].result()
    assert (told(run), run.stdout, run.returncode) == (expected(name), "", 2)


@pytest.mark.parametrize("name", CHECKED_BY_SERVE)
def test_serve_tells_the_same_and_does_not_start(name: str, folder: Path) -> None:
    run = command(folder, "serve", "--config", f"{name}.yaml", environ=INVALID_CONFIGS[name].environ)
    assert (told(run), run.stdout, run.returncode) == (expected(name), "", 2)


@pytest.mark.parametrize("arguments", [("config", "check"), ("serve", "--config")])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("absent.yaml", "absent.yaml: there is no such file; name an existing YAML file"),
        (".", ".: this is a directory; name a YAML file in it"),
    ],
)
def test_what_is_no_file(arguments: tuple[str, ...], path: str, says: str, folder: Path) -> None:
    run = command(folder, *arguments, path)
    assert (told(run), run.returncode) == ((f"tidevoy: {says}",), 2)


def test_a_state_directory_that_cannot_be_made(folder: Path, ports: Ports) -> None:
    (folder / "blocked.yaml").write_text(
        "state_dir: good.pem/state\nxds: {listen: 127.0.0.1:0}\n"
        f"api: {{listen: 127.0.0.1:{ports.allocate()}}}\n"
    )
    run = command(folder, "serve", "--config", "blocked.yaml")
    problem = "good.pem/state cannot be created: Not a directory"
    remedy = "give the user that Tidevoy runs as all rights on it, or set another state_dir"
    assert f"tidevoy: good.pem/state: state_dir: {problem}; {remedy}" in told(run)
    assert run.returncode == 2


def test_a_good_file_passes(folder: Path) -> None:
    (folder / "fine.yaml").write_text(
        "pd: {urls: [http://10.0.0.1:2379]}\nsql: {proxy_protocol: off}\nxds:\n  listen: 0.0.0.0:18000\n"
        "  tls: {cert: good.pem, key: good.key, client_ca: good.pem}\nbackend:\nlog:\n  level:\n"
    )
    run = command(folder, "config", "check", "fine.yaml", environ={"TIDEVOY_LOG__FORMAT": "json"})
    assert (run.stderr, run.returncode) == ("", 0)


def test_faults_as_json(folder: Path) -> None:
    run = command(folder, "config", "check", "--json", "several.yaml")
    assert (run.stderr, run.returncode) == ("", 2)
    assert json.loads(run.stdout) == [
        {
            "where": "several.yaml:5",
            "key": "health.sql.rise",
            "problem": "'x' is not a whole number",
            "remedy": "write a whole number from 1 to 100",
        },
        {
            "where": "several.yaml:2",
            "key": "log.level",
            "problem": "'loud' is not one of the values to choose from",
            "remedy": "write one of debug, info, warning, error",
        },
    ]
    one = command(folder, "config", "check", "--json", "absent.yaml")
    assert ([fault["where"] for fault in json.loads(one.stdout)], one.returncode) == (["absent.yaml"], 2)
    (folder / "empty.yaml").write_text("")
    none = command(folder, "config", "check", "--json", "empty.yaml")
    assert (json.loads(none.stdout), none.stderr, none.returncode) == ([], "", 0)


def test_the_table_is_wide() -> None:
    assert len(INVALID_CONFIGS) >= 30
