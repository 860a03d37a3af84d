"""Which settings an Envoy with the module gets in its live configuration, and which only new Envoys get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.config import schema
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings
from controlplane.model.plan import Plan
from controlplane.xds.resource_set import structures_of
from controlplane.xds.resource_type import CLUSTER, LISTENER, LIVE_CONFIG
from controlplane.xds.resources.profile import (
    LIVE_SETTINGS_FEATURE,
    MODULE_FEATURES,
    MODULE_PROFILE,
    PLAIN_PROFILE,
    EnvoyProfile,
)
from controlplane.xds.snapshot_cache import Snapshot, build_snapshots
from tests.support.controlplane.setting_values import NON_DEFAULTS, nested

LIVE_PROFILE = replace(MODULE_PROFILE, features=frozenset({LIVE_SETTINGS_FEATURE}))
SECTIONS = ("sql", "backend", "tls", "migration")
SETTINGS = [(path, field) for path, field in schema.iter_settings(Settings) if path[0] in SECTIONS]
BASE = {key: value for key, value in NON_DEFAULTS.items() if key.split(".")[0] in SECTIONS}
# Other values of settings whose default is not valid together with the rest.
OTHER_VALUES = {
    "sql.trusted_proxies": ["192.0.2.0/24"],
    "tls.client.mode": "optional",
    "tls.client.client_ca": "/third/ca.pem",
    "tls.backend.mode": "preferred",
}


def snapshot(values: dict[str, Any], profile: EnvoyProfile) -> Snapshot:
    settings = Settings.model_validate(nested(values))
    return build_snapshots(Plan(), settings)[profile]


def structures(one: Snapshot) -> frozenset[str]:
    return structures_of([one.resource_sets[kind].version for kind in (CLUSTER, LISTENER)])


@pytest.mark.parametrize(("path", "field"), SETTINGS, ids=[format_path(path) for path, _ in SETTINGS])
def test_setting_that_applies_now_is_only_in_the_live_configuration(
    path: schema.SettingPath, field: Any
) -> None:
    name = format_path(path)
    default = "/third.pem" if name.endswith((".cert", ".key")) else field.default
    one, two = (
        snapshot(values, LIVE_PROFILE) for values in (BASE, {**BASE, name: OTHER_VALUES.get(name, default)})
    )
    is_live = one.resource_sets[LIVE_CONFIG].version != two.resource_sets[LIVE_CONFIG].version
    is_structural = structures(one) != structures(two)
    applies_now = schema.takes_effect(field).startswith("now")
    assert (is_live, is_structural) == (applies_now, not applies_now)


def test_versions_differ_if_bodies_differ() -> None:
    """A control plane must not repeat a listener with another body under the same version."""
    one, two = (snapshot({"sql.compression": value}, LIVE_PROFILE) for value in ("off", "passthrough"))
    assert structures(one) == structures(two)
    assert one.resource_sets[LISTENER].version != two.resource_sets[LISTENER].version


@pytest.mark.parametrize("profile", [MODULE_PROFILE, PLAIN_PROFILE], ids=["older module", "no module"])
def test_other_envoys_get_settings_only_in_new_listeners_and_clusters(profile: EnvoyProfile) -> None:
    one, two = (snapshot({"backend.max_connect_attempts": value}, profile) for value in (3, 4))
    assert one.resource_sets[LIVE_CONFIG].version == two.resource_sets[LIVE_CONFIG].version
    assert structures(one) != structures(two)
    assert b"settings" not in one.resource_sets[LIVE_CONFIG].body


@pytest.mark.parametrize(
    ("digests", "features", "expected"),
    [
        ("on", MODULE_FEATURES, b'"statements": {"max_rows": 500, "interval": 5.0}'),
        ("on", [LIVE_SETTINGS_FEATURE], b""),
        ("off", MODULE_FEATURES, b""),
    ],
)
def test_only_modules_that_report_statements_get_their_settings(
    digests: str, features: Iterable[str], expected: bytes
) -> None:
    profile = replace(LIVE_PROFILE, features=frozenset(features))
    body = snapshot({"statements.digests": digests}, profile).resource_sets[LIVE_CONFIG].body
    assert (expected in body) if expected else (b"statements" not in body)
