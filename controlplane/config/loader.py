"""Read the settings from a YAML file and environment variables, and validate them.

Precedence, lowest first: default, file, environment. The variable `TIDEVOY_PD__URLS` sets `pd.urls`. Lists
are written with commas or as JSON, mappings as JSON; empty variables are ignored. The ConfigError of an
unusable setting is one line: location, key, problem, remedy.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from controlplane.config import certificate_checks, rule_checks, schema
from controlplane.config.schema import format_path, translate_error
from controlplane.config.settings import Settings
from controlplane.config.text_file import read_text
from controlplane.config.types import TakesEffect
from controlplane.config.yaml_loader import parse_yaml
from controlplane.errors import ConfigError, ConfigErrors
from controlplane.model.views import ReloadResult

ENV_PREFIX = "TIDEVOY_"
# Variables that set command-line options, not settings.
CLI_VARIABLES = frozenset(
    f"TIDEVOY_{name}" for name in ("URL", "CONFIG", "TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY")
)
# Kubernetes sets these variables in every pod if there is a Service named `tidevoy` or `tidevoy-...`
# (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
_KUBERNETES_VARIABLE = re.compile(
    r"TIDEVOY_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?)"
)

Section = TypeVar("Section", bound=BaseModel)


def read_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the settings from a file, if any, and the environment. Raises ConfigError or ConfigErrors."""
    data, lines = ({}, {}) if path is None else parse_yaml(read_text(path, "settings file"), str(path))
    variables = _read_environment(environ)
    for setting_path, (_, value) in variables.items():
        data = _with_value(data, setting_path, value)
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        invalid_settings = [translate_error(Settings, detail) for detail in error.errors(include_url=False)]
    else:
        invalid_settings = [
            *certificate_checks.check_certificates(settings),
            *rule_checks.check_settings(settings),
        ]
    sources: dict[schema.SettingPath, str] = {key: f"{path}:{line}" for key, line in lines.items()}
    sources |= {setting_path: name for setting_path, (name, _) in variables.items()}
    errors = []
    for invalid in invalid_settings:
        source = _find_source(invalid.path, sources) or (str(path) if path else "settings")
        errors.append(ConfigError(source, format_path(invalid.path), invalid.problem, invalid.remedy))
    if errors:
        raise ConfigErrors(errors)
    return settings


def startup_warnings(settings: Settings) -> list[str]:
    """Return warnings about valid but questionable settings, one sentence each."""
    health = settings.health
    warnings = {
        "pd.urls and nodes are both empty; clients reach no TiDB until nodes are added by REST": not (
            settings.pd.urls or settings.nodes
        ),
        "allow_unauthenticated is true; anyone who can reach api.listen or xds.listen controls the"
        " balancer": settings.allow_unauthenticated,
        "all health checks are off; a dead node is detected only by each Envoy's failed connections": not (
            health.status.enabled or health.sql.enabled or health.statement.enabled
        ),
    }
    return [warning for warning, applies in warnings.items() if applies]


def apply_reload(old: Settings, wanted: Settings) -> tuple[Settings, ReloadResult]:
    """Return the settings in force after a reload, and the changed paths, grouped by when they take effect.

    Settings that need a restart keep their old value; every reload reports them again until the restart.
    """
    changed = _no_changes()
    merged = _merge_reloadable(old, wanted, (), changed)
    return merged, _as_result(changed)


def preview_reload(running: Mapping[str, Any], wanted: Settings) -> ReloadResult:
    """Return what a reload would change. `running` are the settings in force, from `dump_masked`.

    Secrets are masked there, so a changed secret is not found.
    """
    changed, masked = _no_changes(), dump_masked(wanted)
    for path, field in schema.iter_settings(Settings):
        before, after = _value_at(running, path), _value_at(masked, path)
        if before != after:
            for when in _effect_times(field, *(_items(field, value) for value in (before, after))):
                changed[when].append(format_path(path))
    return _as_result(changed)


def _value_at(data: Any, path: schema.SettingPath) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _items(field: FieldInfo, value: Any) -> Any:
    """Return the items of a list of sections as models, which `_effect_times` compares; else the value."""
    element = schema.element_field(field) if schema.is_list(field) else None
    model = schema.section_model(element) if element is not None else None
    return value if model is None else [model.model_construct(**item) for item in value or ()]


def dump_masked(settings: BaseModel) -> dict[str, Any]:
    """Return the settings as JSON data; secrets (SecretStr) show as asterisks."""
    return settings.model_dump(mode="json")


def _find_source(path: schema.SettingPath, sources: Mapping[schema.SettingPath, str]) -> str | None:
    """Return the variable or line that sets this path, or else the one that sets its section."""
    for length in range(len(path), 0, -1):
        if source := sources.get(path[:length]):
            return source
        # A variable may have set another key of this section.
        if related := [source for key, source in sources.items() if key[:length] == path[:length]]:
            return related[0]
    return None


def _read_environment(environ: Mapping[str, str]) -> dict[schema.SettingPath, tuple[str, Any]]:
    """Return the variable and the value of each setting in the environment. Raises ConfigErrors."""
    known = {
        ENV_PREFIX + "__".join(map(str, path)).upper(): (path, field)
        for path, field in schema.iter_settings(Settings)
    }
    values: dict[schema.SettingPath, tuple[str, Any]] = {}
    errors: list[ConfigError] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or _is_foreign_variable(variable, text) or not text.strip():
            continue
        if variable not in known:
            children = [name for name in known if name.startswith(f"{variable}__")]
            similar = children or difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0.7)
            remedy = f"did you mean {similar[0]}?" if similar else "docs/reference/configuration.md lists all"
            remedy += " (levels are joined by __)"
            errors.append(ConfigError(variable, "", "no setting has this name", remedy))
            continue
        path, field = known[variable]
        try:
            values[path] = variable, _parse_value(text.strip(), field)
        except ValueError:
            problem, remedy = "the value is not JSON", f"write JSON: {schema.describe_expected(field)}"
            errors.append(ConfigError(variable, format_path(path), problem, remedy))
    if errors:
        raise ConfigErrors(errors)
    return values


def _is_foreign_variable(variable: str, text: str) -> bool:
    return (
        variable in CLI_VARIABLES
        or _KUBERNETES_VARIABLE.fullmatch(variable) is not None
        or (variable.endswith("_PORT") and text.startswith(("tcp://", "udp://", "sctp://")))
    )


def _parse_value(text: str, field: FieldInfo) -> Any:
    """Parse the text of a variable. Raises ValueError if it must be JSON and is not."""
    element = schema.element_field(field)
    if element is None:
        return text
    if schema.is_list(field) and not schema.section_model(element) and not text.startswith("["):
        return [part.strip() for part in text.split(",")]
    return json.loads(text)


def _with_value(data: Any, path: schema.SettingPath, value: Any) -> Any:
    """Return a copy of `data` with one value set. A non-mapping on the path stays: validation rejects it."""
    if not path:
        return value
    if data is not None and not isinstance(data, dict):
        return data
    inner = data or {}
    return {**inner, path[0]: _with_value(inner.get(path[0]), path[1:], value)}


def _as_result(changed: Mapping[str, list[str]]) -> ReloadResult:
    return ReloadResult(
        applied=tuple(changed["now"]),
        applied_by_module=tuple(changed["now with the module"]),
        needs_new_envoys=tuple(changed["new envoys"]),
        needs_restart=tuple(changed["restart"]),
    )


def _no_changes() -> dict[str, list[str]]:
    return {when: [] for when in get_args(TakesEffect)}


def _merge_reloadable(
    old: Section, new: Section, parent: schema.SettingPath, changed: dict[str, list[str]]
) -> Section:
    """Return the new section with the old values of settings that need a restart.

    Adds to `changed` the paths of all settings that differ, grouped by when the change takes effect.
    """
    kept: dict[str, Any] = {}
    for name, field in type(old).model_fields.items():
        path, before, after = (*parent, name), getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            kept[name] = _merge_reloadable(before, after, path, changed)
        elif before != after:
            for when in _effect_times(field, before, after):
                changed[when].append(format_path(path))
            if schema.takes_effect(field) == "restart":
                kept[name] = before
    return new.model_copy(update=kept)


def _effect_times(field: FieldInfo, before: Any, after: Any) -> list[str]:
    """Return when a change takes effect. If a list keeps its length, its items' changed keys decide."""
    item = schema.element_field(field) if schema.is_list(field) else None
    if item is None or schema.section_model(item) is None or len(before) != len(after):
        return [schema.takes_effect(field)]
    changed = _no_changes()
    for old_item, new_item in zip(before, after, strict=True):
        _merge_reloadable(old_item, new_item, (), changed)
    return [when for when, paths in changed.items() if paths]
