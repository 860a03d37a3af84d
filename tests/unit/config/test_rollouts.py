"""Settings of rollouts, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.config import reference_docs
from controlplane.config.loader import read_settings
from controlplane.config.settings import Settings
from controlplane.errors import ConfigError
from controlplane.rollouts.actions import actions

RESTART = """
rollouts:
  actions:
    restart: {command: [ssh, "{host}", sudo, systemctl, restart, "tidb-{port}"], timeout: 60}
    hook: {webhook: "https://deploy.internal/restart"}
"""


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Settings:
    (tmp_path / "t.yaml").write_text(text)
    return read_settings(tmp_path / "t.yaml", environ or {})


def test_loads_named_actions(tmp_path: Path) -> None:
    rollouts = load(tmp_path, RESTART).rollouts
    assert list(rollouts.actions) == ["restart", "hook"]
    assert rollouts.actions["restart"].command == (
        "ssh",
        "{host}",
        "sudo",
        "systemctl",
        "restart",
        "tidb-{port}",
    )
    assert rollouts.actions["hook"].webhook == "https://deploy.internal:443/restart"
    environ = {"TIDEVOY_ROLLOUTS__ACTIONS": '{"one": {"command": ["true"]}}'}
    assert list(load(tmp_path, RESTART, environ).rollouts.actions) == ["one"]


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (
            "{actions: {manual: {command: [a]}}}",
            "rollouts.actions.manual: 'manual' is reserved for the built-in action",
        ),
        ("{actions: {'a b': {command: [a]}}}", "rollouts.actions.a b: 'a b' is not allowed; write up to"),
        ("{actions: {a: {}}}", "rollouts.actions.a.command: has neither a command nor a webhook"),
        (
            "{actions: {a: {command: [a], webhook: 'http://b/'}}}",
            "rollouts.actions.a.command: has both a command and a webhook",
        ),
        (
            "{actions: {a: {command: ['{node}']}}}",
            "rollouts.actions.a.command.0: {node} is not a placeholder",
        ),
        ("{actions: {a: {webhook: 'ftp://b/'}}}", "rollouts.actions.a.webhook: 'ftp://b/' is not an http"),
        (
            "{actions: {a: {webhook: 'https://b/?key=hunter2'}}}",
            "rollouts.actions.a.webhook: the URL has a query or a fragment; remove it",
        ),
        (
            "{actions: {a: {command: [a], token_file: /t}}}",
            "rollouts.actions.a.token_file: is set without webhook",
        ),
        ("{actions: {a: {command: [a], timeout: 0}}}", "rollouts.actions.a.timeout: 0 is not allowed"),
        ("{actions: {a: {comand: [a]}}}", "rollouts.actions.a.comand: there is no such setting"),
        ("{actions: {a: b}}", "rollouts.actions.a: 'b' is not allowed; write a mapping with command"),
        ("{actions: [a]}", "rollouts.actions: a list is not allowed; write a mapping of names to a mapping"),
        (
            "{verification: {user: a, ca: /no/such/file}}",
            "rollouts.verification.ca: /no/such/file cannot be read: No such file",
        ),
        (
            "{probe: {user: a, ca: /no/such/file}}",
            "rollouts.probe.ca: /no/such/file cannot be read: No such file",
        ),
    ],
)
def test_rejects_invalid_settings(tmp_path: Path, rollouts: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"rollouts: {rollouts}")
    assert message in str(error.value)
    assert "hunter2" not in str(error.value)


def test_rollout_settings_are_documented() -> None:
    page = reference_docs.render("")
    assert "## `rollouts.actions.*`" in page
    assert "## `rollouts.probe`" in page


def test_placeholders_are_expanded_once() -> None:
    values: dict[str, Any] = {"address": "{host}", "host": "h"}
    assert actions.expand("{address} {host} {port} {{host}}", values) == "{host} h {port} {h}"
