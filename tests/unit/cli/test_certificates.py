"""`tidevoy certificates`: what it prints, its JSON, and its exit codes."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import run

ENVOYS = ("--envoy", "e1", "--envoy", "zone a/1")


@pytest.fixture
def directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A directory with a CA and the certificates of a control plane and two Envoys."""
    path = tmp_path / "it's here"
    assert run(["certificates", "init", str(path), "--control-plane", "cp-0.test", *ENVOYS]) == 0
    capsys.readouterr()
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["certificates", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_init_prints_settings_and_bootstrap_options(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["certificates", "init", str(directory), "--envoy", "e2", "--days", "10"]) == 0
    output = capsys.readouterr().out
    assert "\nkept     control-plane.pem: cp-0.test, until 20" in output
    assert "\ncreated  envoy-e2.pem: e2, until 20" in output
    settings_text, _, commands = output.partition("# For the configuration")[2].partition("\n# For the boot")
    settings = yaml.safe_load(settings_text.partition("\n")[2])
    ca = str(directory / "ca.pem")
    assert settings == {
        "xds": {
            "tls": {
                "cert": str(directory / "control-plane.pem"),
                "key": str(directory / "control-plane.key"),
                "client_ca": ca,
            }
        }
    }
    stems = {"e1": "envoy-e1", "e2": "envoy-e2", "zone a/1": "envoy-zone%20a%2F1"}
    files = {
        envoy: {"ca": ca, "cert": str(directory / f"{stem}.pem"), "key": str(directory / f"{stem}.key")}
        for envoy, stem in stems.items()
    }
    assert [shlex.split(line) for line in commands.splitlines()[1:]] == [
        ["tidevoy", "bootstrap", "--id", envoy, "--ca", ca, "--cert", pair["cert"], "--key", pair["key"]]
        for envoy, pair in files.items()
    ]

    result = run_json(capsys, "init", str(directory))
    assert {"xds": result["xds"], "bootstrap": result["bootstrap"]} == {**settings, "bootstrap": files}
    assert [entry["action"] for entry in result["files"]] == ["kept"] * 4


def test_renew_is_quiet_without_work_and_says_what_to_do_after_work(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["certificates", "renew", str(directory)]) == 0
    assert capsys.readouterr() == ("", "")
    assert run(["certificates", "renew", str(directory), "--within", "366d", "--days", "370"]) == 0
    output = capsys.readouterr().out
    assert output.count("renewed  ") == 6
    assert "* control planes: nothing, if xds.tls names the files in this directory" in output
    assert "* Envoys (e1, zone a/1): copy the new files" in output
    assert "CA" not in output

    result = run_json(capsys, "renew", str(directory), "--within", "4000d")
    assert [(entry["file"], entry["action"]) for entry in result["files"][:2]] == [
        ("ca-new.key", "created"),
        ("ca.pem", "added"),
    ]
    command = f"tidevoy certificates renew {shlex.quote(str(directory))} --use-new-ca"
    assert f"then run `{command}`" in result["steps"][-1]
    assert run(["certificates", "renew", str(directory)]) == 0
    assert "\n* The CA expires soon, and ca.pem contains its successor" in capsys.readouterr().out
    assert run(shlex.split(command)[1:]) == 0
    assert "replaced ca.key" in capsys.readouterr().out
    assert run(["certificates", "renew", str(directory)]) == 0
    assert capsys.readouterr() == ("", "")


def test_show_lists_names_expiry_and_problems(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(directory / "control-plane.key", directory / "envoy-e1.key")
    assert run(["certificates", "show", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["FILE", "NAMES", "EXPIRES", "DAYS", "LEFT", "PROBLEM"]
    assert [line.split()[0] for line in lines[1:]] == [
        *("ca.pem", "control-plane.pem", "envoy-e1.pem", "envoy-zone%20a%2F1.pem")
    ]
    assert "the key does not match" in lines[3]
    certificates = run_json(capsys, "show", str(directory))["certificates"]
    assert [(entry["names"], entry["days_left"]) for entry in certificates[1:]] == [
        (["cp-0.test"], 364),
        (["e1"], 364),
        (["tidevoy://envoys/zone%20a%2F1"], 364),
    ]
    assert certificates[0]["names"][0].startswith("Tidevoy CA ")
    assert certificates[0]["days_left"] == 3649
    assert [bool(entry["problem"]) for entry in certificates] == [False, False, True, False]

    other = directory.parent / "other"
    assert run(["certificates", "init", str(other), "--control-plane", "x", "--ca-days", "1"]) == 0
    shutil.copy(other / "ca.pem", directory / "ca.pem")
    capsys.readouterr()
    problems = [entry["problem"] for entry in run_json(capsys, "show", str(directory))["certificates"]]
    assert problems == ["", *["not issued by a CA in ca.pem"] * 3]


@pytest.mark.parametrize(
    ("command", "exit_code", "problem"),
    [
        ("init {new}", 2, "name the hosts to which Envoys connect, with --control-plane"),
        ("init {new} --control-plane cp:18000", 2, "--control-plane cp:18000 is neither a DNS name"),
        ("init {new} --control-plane cp --envoy cp", 2, "give the Envoy another id"),
        ("init {new} --control-plane cp --days 0", 2, "'--days'"),
        ("init {file} --control-plane cp", 2, "is not a directory; name a directory"),
        ("renew {new}", 2, "there is no directory"),
        ("renew {empty}", 2, "has no ca.pem; `tidevoy certificates init` makes one"),
        ("renew {file}", 2, "is not a directory"),
        ("renew {empty} --within 1x", 2, "'1x' is not a duration"),
        ("show {new}", 2, "there is no directory"),
        ("show {file}", 2, "is not a directory"),
        ("show {broken}", 1, "ca.pem is not a certificate in PEM format"),
    ],
)
def test_wrong_use_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, exit_code: int, problem: str
) -> None:
    paths = {name: tmp_path / name for name in ("new", "file", "empty", "broken")}
    paths["file"].touch()
    paths["empty"].mkdir()
    paths["broken"].mkdir()
    (paths["broken"] / "ca.pem").write_text("x")
    assert run(["certificates", *command.format_map(paths).split()]) == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err
    assert not list(tmp_path.rglob("*.key"))
