"""Settings of a running control plane: what a reload applies, what is shown, and what is documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, SecretStr

from controlplane.config import reference_docs, schema
from controlplane.config.loader import apply_reload, dump_masked, preview_reload
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings, build_policy
from controlplane.config.types import TakesEffect
from controlplane.model.nodes import NodeGroup
from controlplane.model.plan import BalancePolicy
from tests.support.controlplane.setting_values import NON_DEFAULTS, PAIRED, nested

LEAVES = list(schema.iter_settings(Settings))
DOCS = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"

SWITCHES = {
    "health.status.tls": "client_tls",
    "tls.client.client_ca": "tls.client.crl",
    "tls.backend.mode": "tls.backend",
    "xds.tls.client_ca": "xds.tls.verify_node_id",
    "api.tls.client_ca": "api.clients",
}
# Settings that another setting needs.
NEEDED_BY = {
    "pd.urls": "replicas.enabled",
    "xds.tls.client_ca": "replicas.enabled",
    "health.statement.user": "health.statement.enabled",
}


@pytest.mark.parametrize(
    ("path", "field"), LEAVES, ids=lambda part: format_path(part) if isinstance(part, tuple) else ""
)
def test_reload_reports_when_each_change_takes_effect(path: schema.SettingPath, field: Any) -> None:
    name = format_path(path)
    # Omit settings that would be invalid: certificates while TLS is off, and a certificate without its key.
    disabled = SWITCHES.get(name, "nothing")
    base = {
        key: value
        for key, value in NON_DEFAULTS.items()
        if disabled not in key or key.split(".")[-1] not in PAIRED
    }
    if name in NEEDED_BY:
        del base[NEEDED_BY[name]]
    other = "/third" if name.endswith((".cert", ".key")) else field.default
    if name == "tls.client.mode":
        other = "optional"  # `required` is the base value, and `disabled` rejects the certificates
    if name == "sql.trusted_proxies":
        other = ["192.0.2.0/24"]  # `sql.proxy_protocol` needs networks
    old, new = Settings.model_validate(nested(base)), Settings.model_validate(nested({**base, name: other}))
    applied, changed = apply_reload(old, new)
    reported = {
        "now": changed.applied,
        "now with the module": changed.applied_by_module,
        "new envoys": changed.needs_new_envoys,
        "restart": changed.needs_restart,
    }
    when = schema.takes_effect(field)
    assert reported == {effect: ((name,) if effect == when else ()) for effect in reported}
    assert applied == (old if when == "restart" else new)
    assert preview_reload(dump_masked(old), new) == changed


@pytest.mark.parametrize(
    ("changes", "now", "new_envoys"),
    [
        ([{"listen": "0.0.0.0:6002"}], (), ("groups",)),
        ([{"labels": {"use": "other"}}], ("groups",), ()),
        ([{"listen": "0.0.0.0:6002", "labels": {"use": "other"}}], ("groups",), ("groups",)),
        ([], ("groups",), ()),
    ],
)
def test_group_change_takes_effect_like_its_changed_keys(
    changes: list[dict[str, Any]], now: tuple[str, ...], new_envoys: tuple[str, ...]
) -> None:
    olap = {"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}}
    old, new = ({"groups": groups} for groups in ([olap], [olap | change for change in changes]))
    _, changed = apply_reload(Settings.model_validate(old), Settings.model_validate(new))
    assert (changed.applied, changed.needs_new_envoys, changed.needs_restart) == (now, new_envoys, ())
    assert preview_reload(dump_masked(Settings.model_validate(old)), Settings.model_validate(new)) == changed


def test_changed_report_interval_is_reported_to_need_new_envoys() -> None:
    """The bootstrap of an Envoy contains its module's interval."""
    old, new = (Settings.model_validate({"balance": {"report_interval": value}}) for value in (1.0, 5.0))
    applied, changed = apply_reload(old, new)
    assert applied.balance.report_interval == 5.0  # load reports use the new interval at once
    assert (changed.applied, changed.needs_new_envoys) == ((), ("balance.report_interval",))


def test_reload_reports_pending_restart_again() -> None:
    wanted = Settings.model_validate({"api": {"listen": "127.0.0.1:3081"}, "log": {"level": "debug"}})
    applied, first = apply_reload(Settings(), wanted)
    assert (first.applied, first.needs_restart) == (("log.level",), ("api.listen",))
    _, second = apply_reload(applied, wanted)
    assert (second.applied, second.needs_restart) == ((), ("api.listen",))


def test_added_tls_section_needs_restart() -> None:
    wanted = Settings.model_validate({"xds": {"tls": {"cert": "c", "key": "k"}}})
    applied, changed = apply_reload(Settings(), wanted)
    assert (applied.xds.tls, changed.needs_restart) == (None, ("xds.tls",))


def test_dump_masks_secrets() -> None:
    class Section(BaseModel):
        token: SecretStr = SecretStr("hunter2")

    assert dump_masked(Section()) == {"token": "**********"}
    assert dump_masked(Settings())["state_dir"] == "/var/lib/tidevoy"


def test_build_policy_copies_settings() -> None:
    policy = build_policy(Settings.model_validate(nested(NON_DEFAULTS)))
    assert policy.balance_policy is BalancePolicy.LOCATION
    assert (policy.status_rise, policy.sql_fall, policy.panic_threshold, policy.gone_grace) == (
        5,
        5,
        0.5,
        1.5,
    )
    assert (policy.status_check, policy.sql_check, policy.statement_check) == (False, False, True)
    assert (policy.statement_rise, policy.statement_fall) == (5, 5)
    assert policy.groups == (NodeGroup("olap", {"use": "olap"}),)
    assert (policy.backup_labels, policy.zone_label, policy.zone_overload_ratio) == (
        {"role": "backup"},
        "rack",
        2.5,
    )


@pytest.mark.parametrize(
    "field", [field for _, field in LEAVES], ids=[format_path(path) for path, _ in LEAVES]
)
def test_every_setting_has_documentation(field: Any) -> None:
    assert field.description
    assert field.description.endswith(".")
    assert field.json_schema_extra["change"] in get_args(TakesEffect)
    assert "a value" not in schema.describe_expected(field)


def test_reference_docs_are_up_to_date() -> None:
    page = DOCS.read_text()
    assert page == reference_docs.render(page), "run python -m controlplane.config.reference_docs"
