"""Read the settings from a YAML file and environment variables, and validate them.

Precedence, lowest first: default, file, environment. `TIDEVOY_PD__URLS` is `pd.urls`; a list is written with
commas or as JSON, mappings as JSON; a variable with an empty value counts as not set. An unusable setting is
a ConfigError of one line: location, key, problem, remedy.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from controlplane.config import certificate_checks, schema, yaml_loader
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings
from controlplane.config.validation_errors import translate_error
from controlplane.config.yaml_loader import YamlDocument
from controlplane.errors import ConfigError, ConfigErrors
from controlplane.model.views import ReloadResult

ENV_PREFIX = "TIDEVOY_"
# Options of the command line, not settings.
CLI_VARIABLES = frozenset(
    f"TIDEVOY_{name}" for name in ("URL", "CONFIG", "TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY")
)
# Kubernetes sets such variables in every pod if there is a Service named `tidevoy` or `tidevoy-...`
# (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
_KUBERNETES_VARIABLE = re.compile(
    r"TIDEVOY(_[A-Z0-9]+)*?_(SERVICE_(HOST|PORT)(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?)"
)
_KUBERNETES_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://.*")

_MAX_FILE_BYTES = 1 << 20


def read_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the settings from a file (None: none) and the environment. Raises ConfigError or ConfigErrors."""
    document = YamlDocument() if path is None else yaml_loader.parse_yaml(_read_file(path), str(path))
    name = "settings" if path is None else str(path)
    variables = _read_environment(environ)
    data = document.data
    for key, value in variables.values():
        data = _with_value(data, key, value)
    locations = _SourceLocations(
        name, document.lines, {key: variable for variable, (key, _) in variables.items()}
    )
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        invalid_settings = [translate_error(Settings, detail) for detail in error.errors(include_url=False)]
    else:
        invalid_settings = certificate_checks.check_certificates(settings)
    _raise_errors(
        [
            ConfigError(
                locations.locate(invalid.path), format_path(invalid.path), invalid.problem, invalid.remedy
            )
            for invalid in invalid_settings
        ]
    )
    return settings


def startup_warnings(settings: Settings) -> list[str]:
    """Return warnings about valid but questionable settings, one sentence each."""
    warnings: list[str] = []
    if not settings.pd.urls and not settings.nodes:
        warnings.append(
            "pd.urls and nodes are both empty; clients reach no TiDB until nodes are added by REST"
        )
    if settings.allow_unauthenticated:
        warnings.append(
            "allow_unauthenticated is true; anyone who can reach api.listen or xds.listen controls the"
            " balancer"
        )
    if not settings.health.status.enabled and not settings.health.sql.enabled:
        warnings.append(
            "both health checks are off; a dead node is detected only by each Envoy's failed connections"
        )
    return warnings


def apply_reload(old: Settings, wanted: Settings) -> tuple[Settings, ReloadResult]:
    """Return the settings in force after a reload, and what changed, as dotted paths by when it takes effect.

    Settings that need a restart keep their old value, and every reload reports them until a restart.
    """
    changed = changed_settings(old, wanted)
    return _merge_reloadable(old, wanted), changed


def changed_settings(old: Settings, new: Settings) -> ReloadResult:
    """Return the settings that differ, as dotted paths by when a change takes effect."""
    differing: dict[str, list[str]] = {"now": [], "new envoys": [], "restart": []}
    for path, when in _differences(old, new, ()):
        differing[when].append(format_path(path))
    return ReloadResult(
        applied=tuple(differing["now"]),
        needs_new_envoys=tuple(differing["new envoys"]),
        needs_restart=tuple(differing["restart"]),
    )


def dump_masked(settings: BaseModel) -> dict[str, Any]:
    """Return the settings as JSON data; secrets (SecretStr) show as asterisks."""
    return settings.model_dump(mode="json")


class _SourceLocations:
    """Where each setting comes from: a variable, a line of the file, or neither."""

    def __init__(
        self, name: str, lines: Mapping[schema.SettingPath, int], variables: Mapping[schema.SettingPath, str]
    ) -> None:
        self._name, self._lines, self._variables = name, lines, variables

    def locate(self, path: schema.SettingPath) -> str:
        parents = [path[:length] for length in range(len(path), 0, -1)]
        for part in parents:
            if part in self._variables:
                return self._variables[part]
            if part in self._lines:
                return f"{self._name}:{self._lines[part]}"
            # A variable may have set another key of this section, in which this one is missing or wrong.
            related = [name for key, name in self._variables.items() if key[: len(part)] == part]
            if related:
                return related[0]
        return self._name


def _read_file(path: Path) -> str:
    where = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(where, "", "the file does not exist", "name an existing YAML file") from None
    except IsADirectoryError:
        raise ConfigError(where, "", "it is a directory", "name a YAML file in it") from None
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        raise ConfigError(where, "", problem, "make it readable for the user that Tidevoy runs as") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(where, "", "the file is larger than 1 MiB", "name the file with the settings")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise ConfigError(f"{where}:{line}", "", problem, "save the file as UTF-8") from None


def _read_environment(environ: Mapping[str, str]) -> dict[str, tuple[schema.SettingPath, Any]]:
    """Return the settings in the environment, variable -> (path, value). Raises ConfigError if unknown."""
    known = {
        ENV_PREFIX + "__".join(map(str, path)).upper(): (path, field)
        for path, field in schema.leaves(Settings)
    }
    values: dict[str, tuple[schema.SettingPath, Any]] = {}
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
            values[variable] = path, _parse_value(text.strip(), field)
        except ValueError:
            problem, remedy = "the value is not JSON", f"write JSON: {schema.describe_expected(field)}"
            errors.append(ConfigError(variable, format_path(path), problem, remedy))
    _raise_errors(errors)
    return values


def _is_foreign_variable(variable: str, text: str) -> bool:
    return (
        variable in CLI_VARIABLES
        or _KUBERNETES_VARIABLE.fullmatch(variable) is not None
        or (variable.endswith("_PORT") and _KUBERNETES_PORT_VALUE.fullmatch(text) is not None)
    )


def _parse_value(text: str, field: FieldInfo) -> Any:
    """Parse the text of a variable. Raises ValueError if it must be JSON and is not."""
    item = schema.item_field(field)
    if schema.is_mapping(field):
        return json.loads(text)
    if item is None:
        return text
    if text.startswith("[") or schema.section_model(item):
        return json.loads(text)
    return [part.strip() for part in text.split(",")]


def _with_value(data: Any, path: schema.SettingPath, value: Any) -> Any:
    """Return a copy of the data with one value set; a non-mapping on the path stays, to be rejected later."""
    if not path:
        return value
    if data is not None and not isinstance(data, dict):
        return data
    inner = data or {}
    return {**inner, path[0]: _with_value(inner.get(path[0]), path[1:], value)}


def _merge_reloadable(old: Any, new: Any) -> Any:
    """Return the new settings with the old values of those that need a restart."""
    overrides: dict[str, Any] = {}
    for name, field in type(old).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            overrides[name] = _merge_reloadable(before, after)
        elif schema.takes_effect(field) == "restart":
            overrides[name] = before
    return new.model_copy(update=overrides)


def _differences(
    old: BaseModel, new: BaseModel, parent: schema.SettingPath
) -> Iterator[tuple[schema.SettingPath, str]]:
    for name, field in type(old).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _differences(before, after, (*parent, name))
        elif before != after:
            yield from (((*parent, name), when) for when in sorted(_effect_times(field, before, after)))


def _effect_times(field: FieldInfo, before: Any, after: Any) -> set[str]:
    """Return when a change takes effect; for a list of the same length, that of the changed items' keys."""
    item = schema.item_field(field)
    if item is None or schema.section_model(item) is None or len(before) != len(after):
        return {schema.takes_effect(field)}
    pairs = zip(before, after, strict=True)
    return {when for old_item, new_item in pairs for _, when in _differences(old_item, new_item, ())}


def _raise_errors(errors: list[ConfigError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)
