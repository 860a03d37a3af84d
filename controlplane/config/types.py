"""Building blocks of settings: documented fields, validated types, sections that reject unknown keys."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from controlplane import address as addresses

# "now with the module": Envoys without the module apply the change when they start.
TakesEffect = Literal["now", "now with the module", "new envoys", "restart"]


class SettingError(ValueError):
    """An unusable value, with problem and remedy.

    `key` is the path from the validated section to the setting. Without a remedy, the loader describes the
    values that the setting accepts.
    """

    def __init__(self, problem: str, remedy: str = "", key: str = "") -> None:
        self.problem, self.remedy, self.key = problem, remedy, key
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """Describes how a value of this type is written, for messages and documentation."""

    text: str


def setting(default: Any, *, takes_effect: TakesEffect = "now", unit: str = "", **limits: Any) -> Any:
    """Define a field; the string below it documents it. With `...` as default, it is required.

    `limits` are pydantic's (`ge`, `le`, `max_length`, ...).
    """
    return Field(default, json_schema_extra={"change": takes_effect, "unit": unit}, **limits)


def section(model: type[BaseModel], meaning: str) -> Any:
    """Define a section with its documentation."""
    return Field(default_factory=model, description=meaning)


def reject_duplicates(key: str, values: Iterable[str], remedy: str) -> None:
    """Raise SettingError for a value that is listed twice; in `key`, `{}` is replaced by its index."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise SettingError(f"{value} is listed twice", remedy, key.format(index))
        seen.add(value)


def _validate_address(value: str) -> str:
    try:
        return addresses.join(*addresses.split(value))
    except ValueError as error:
        problem, _, remedy = str(error).partition("; ")
        raise SettingError(problem, remedy) from None


def _validate_listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if port.isdigit() and host in ("", "*"):
        raise SettingError(
            f"{value!r} has no address", f"write 0.0.0.0:{port} for every IPv4 address of the machine"
        )
    if port == "0":  # any free port
        return _validate_address(f"{host}:1").removesuffix("1") + "0"
    return _validate_address(value)


def _validate_envoy_listen(value: str) -> str:
    address = _validate_listen(value)
    if literal_host(address) is None:
        raise SettingError(f"{address!r} has a host name, and Envoy listens on IP addresses only")
    return _validate_address(address)  # rejects port 0


def _validate_url(value: str) -> str:
    """Validate an http(s) URL, and add the default port of its scheme."""
    if "@" in value:  # not shown: it may hold a password
        raise SettingError("the URL contains a user", "remove the part before the @")
    if "?" in value or "#" in value:  # not shown: it may hold a secret
        raise SettingError("the URL has a query or a fragment", "remove it")
    try:
        parts = urllib.parse.urlsplit(value)
        default_port = {"http": 80, "https": 443}[parts.scheme]
        port = default_port if parts.port is None else parts.port
        address = addresses.join(*addresses.split(addresses.join(parts.hostname or "", port)))
    except (ValueError, KeyError):
        raise SettingError(f"{value!r} is not an http:// or https:// URL") from None
    return f"{parts.scheme}://{address}{parts.path}"


def _validate_pd_url(value: str) -> str:
    url = _validate_url(value)
    _validate_address(value.partition("://")[2].rstrip("/"))  # the port is required
    return url.rstrip("/")


def _validate_cidr(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError as error:
        raise SettingError(str(error), "write a network such as 10.0.0.0/8, or one address") from None


def validate_envoy_path(path: Path) -> Path:
    """Validate a path on the Envoys' machines, which the control plane cannot access."""
    if not path.is_absolute():
        raise SettingError(f"'{path}' is a relative path, and an Envoy may be started in any directory")
    return path


def literal_host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the literal IP address of a listening address; None for a host name."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


Address = Annotated[str, AfterValidator(_validate_address), ValueFormat("host:port, such as 10.0.0.1:4000")]
ListenAddress = Annotated[
    str, AfterValidator(_validate_listen), ValueFormat("an address and a port, such as 127.0.0.1:3080")
]
EnvoyListenAddress = Annotated[
    str, AfterValidator(_validate_envoy_listen), ValueFormat("an IP address and a port, such as 0.0.0.0:6000")
]
Cidr = Annotated[str, AfterValidator(_validate_cidr), ValueFormat("a network, such as 10.0.0.0/8")]
HttpUrl = Annotated[
    str, AfterValidator(_validate_url), ValueFormat("a URL, such as https://deploy.internal/restart")
]
PdUrl = Annotated[str, AfterValidator(_validate_pd_url), ValueFormat("a URL, such as http://10.0.0.1:2379")]
File = Annotated[Path, ValueFormat("the path of a file")]
Directory = Annotated[Path, ValueFormat("the path of a directory")]


class SettingsSection(BaseModel):
    """A group of settings. Unknown keys are rejected, and a key without a value gets its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # A section stays valid when all of its settings are commented out.
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_and_empty(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1, and the empty path as the working directory.
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise SettingError(f"{str(value).lower()} is not a number")
        if value == "":
            raise SettingError("the text is empty")
        return value
