"""The commands import-tiproxy and import-haproxy: output, files and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trustme

from cli.main import run
from controlplane.config.loader import read_settings

TOML = '[proxy]\npd-addrs = "10.0.0.1:2379"\n[api]\npassword = "hunter2"\n'


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_prints_the_yaml_and_the_table_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "tiproxy.toml", TOML)
    assert run(["import-tiproxy", file]) == 0
    output = capsys.readouterr()
    target = tmp_path / "tidevoy.yaml"
    target.write_text(output.out)
    assert read_settings(target, {}).pd.urls == ("http://10.0.0.1:2379",)
    lines = [re.sub(" {2,}", "  ", line) for line in output.err.splitlines()]
    assert lines[0] == "LINE  KEY  TIDEVOY  NOTE"
    assert lines[1].startswith("2  proxy.pd-addrs  pd.urls: [http://10.0.0.1:2379]  ")
    assert lines[2].startswith("4  api.password  no equivalent  callers authenticate by tokens")
    assert lines[3] == "tidevoy: defaults that differ:"
    assert lines[-1] == "tidevoy: keys: 1 mapped, 1 no equivalent; lines with TODO: 0"
    assert "hunter2" not in output.out + output.err


def test_cuts_nothing_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    toml = '[proxy.backend-healthy-keepalive]\nenabled = true\n[proxy]\npd-addrs = "10.0.0.1:2379"\n'
    assert run(["import-tiproxy", write(tmp_path / "tiproxy.toml", toml)]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert "\u2026" not in shown
    for word in ("always", "probes", "keepalive", "[http://10.0.0", "overload.max", "--deadline"):
        assert word in shown


def test_json_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "tiproxy.toml", TOML)
    assert run(["import-tiproxy", file, "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert output.err == ""
    assert set(result) == {"yaml", "keys", "different_defaults", "todos"}
    assert result["keys"][0] == {
        "key": "proxy.pd-addrs",
        "line": 2,
        "outcome": "mapped",
        "setting": "pd.urls",
        "value": "[http://10.0.0.1:2379]",
        "note": result["keys"][0]["note"],
    }
    assert "hunter2" not in output.out


def test_unknown_keys_make_the_command_fail_after_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "tiproxy.toml", "[proxy]\nx = 1\nmax-connections = 3\n")
    assert run(["import-tiproxy", file]) == 1
    output = capsys.readouterr()
    assert "max_connections: 3" in output.out
    assert "unknown to this importer" in output.err


def test_writes_a_file_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = write(tmp_path / "tiproxy.toml", TOML), tmp_path / "tidevoy.yaml"
    command = ["import-tiproxy", file, "--output", str(target)]
    assert run(command) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert f"tidevoy: wrote {target}" in output.err
    first = target.read_text()
    target.write_text("mine")
    assert run(command) == 2
    assert target.read_text() == "mine"
    assert "already exists; name a new file, or overwrite it with --force" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0
    assert target.read_text() == first
    assert run(["import-tiproxy", file, "--output", str(tmp_path / "no" / "x.yaml")]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[proxy]\naddr = 5", r"tiproxy.toml:2: proxy.addr: 5 is not text; write text"),
        (b"\xff", r"tiproxy.toml:1: the byte 0xff is not UTF-8"),
        (b"x" * (1 << 20) + b"x", r"tiproxy.toml: the file is larger than 1 MiB"),
        (None, r"tiproxy.toml: the file cannot be read: No such file"),
    ],
)
def test_reports_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    file = tmp_path / "tiproxy.toml"
    if content is not None:
        file.write_bytes(content)
    assert run(["import-tiproxy", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert re.search(message, line)


def test_imported_certificate_files_pass_the_check_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tidevoy config check` opens the files on the machine of the control plane."""
    ca, files = trustme.CA(), {}
    certificate = ca.issue_cert("tiproxy")
    for name, blob in (
        ("ca", ca.cert_pem),
        ("cert", certificate.cert_chain_pems[0]),
        ("key", certificate.private_key_pem),
    ):
        blob.write_to_path(str(tmp_path / f"{name}.pem"))
        files[name] = f'{name} = "{tmp_path / name}.pem"'
    section = "\n".join(files.values())
    toml = (
        f'[security.cluster-tls]\n{section}\n[security.server-http-tls]\n{section}\ncert-allowed-cn = ["a"]\n'
    )
    target = tmp_path / "tidevoy.yaml"
    assert run(["import-tiproxy", write(tmp_path / "t.toml", toml), "--output", str(target)]) == 0
    assert run(["config", "check", str(target)]) == 0
    assert f"{target} is valid" in capsys.readouterr().out


HAPROXY = """\
listen tidb
 bind :3306
 server a "${TIDB_HOST}:4000"
listen other
 bind :3307
 server a 10.0.0.2:3306
"""


def test_imports_a_proxy_of_haproxy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDB_HOST", "10.0.0.1")
    file = write(tmp_path / "haproxy.cfg", HAPROXY)
    assert run(["import-haproxy", file]) == 2
    assert "choose one with --proxy: tidb, other" in capsys.readouterr().err
    assert run(["import-haproxy", file, "--proxy", "tidb"]) == 0
    output = capsys.readouterr()
    assert "- address: 10.0.0.1:4000  # server a (line 3)" in output.out
    assert "listen other" in output.err
    assert run(["import-haproxy", file, "--proxy", "tidb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"][0]["key"] == "bind :3306"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    output = capsys.readouterr().out
    assert "import-tiproxy" in output
    assert "import-haproxy" in output
