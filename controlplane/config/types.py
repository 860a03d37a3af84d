"""Building blocks of settings: documented fields, validated types, sections that reject unknown keys."""

from __future__ import annotations

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

TakesEffect = Literal["now", "new envoys", "restart"]


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
    """Description of how a value of this type is written, for messages and documentation."""

    text: str


def setting(default: Any, meaning: str, takes_effect: TakesEffect, unit: str = "", **limits: Any) -> Any:
    """Define a documented field. `limits` are pydantic's (`ge`, `le`, `min_length`, ...)."""
    return Field(
        default, description=meaning, json_schema_extra={"change": takes_effect, "unit": unit}, **limits
    )


def required(meaning: str, takes_effect: TakesEffect) -> Any:
    """Define a documented field without a default."""
    return setting(..., meaning, takes_effect)


def section(model: type[BaseModel], meaning: str) -> Any:
    """Define a documented section; each of its settings says when a change takes effect."""
    return Field(default_factory=model, description=meaning)


def _split_address(value: str) -> tuple[str, int]:
    try:
        return addresses.split(value)
    except ValueError as error:
        problem, _, remedy = str(error).partition("; ")
        raise SettingError(problem, remedy) from None


def _validate_address(value: str) -> str:
    return addresses.join(*_split_address(value))


def _validate_listen(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if colon and host in ("", "*"):
        raise SettingError(
            f"{value!r} has no address", f"write 0.0.0.0:{port} for every IPv4 address of the machine"
        )
    return _validate_address(value)


def _validate_listen_any_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    return (
        addresses.join(_split_address(f"{host}:1")[0], 0) if host and port == "0" else _validate_listen(value)
    )


def _validate_envoy_listen(value: str) -> str:
    address = _validate_listen(value)
    if literal_host(address) is None:
        raise SettingError(
            f"{address!r} has a host name, and Envoy listens on IP addresses only",
            "write an IP address and a port, such as 0.0.0.0:6000",
        )
    return address


def _validate_pd_url(value: str) -> str:
    scheme, sep, rest = value.partition("://")
    if "@" in value:  # not shown: it may hold a password
        raise SettingError(
            "the URL contains a user",
            "remove the part before the @; PD authenticates by certificates (pd.tls)",
        )
    if not sep or scheme not in ("http", "https"):
        raise SettingError(f"{value!r} does not begin with http:// or https://")
    return f"{scheme}://{addresses.join(*_split_address(rest.rstrip('/')))}"


def validate_envoy_path(path: Path) -> Path:
    """Validate a path on the Envoys' machines, which the control plane cannot access."""
    if not path.is_absolute():
        raise SettingError(f"'{path}' is a relative path, and an Envoy may be started in any directory")
    return path


def literal_host(address: str) -> str | None:
    """Return the literal IP address of a listening address without brackets; None for a host name."""
    return addresses.literal_ip(address.rpartition(":")[0].strip("[]"))


Address = Annotated[str, AfterValidator(_validate_address), ValueFormat("host:port, such as 10.0.0.1:4000")]
ListenAddress = Annotated[
    str, AfterValidator(_validate_listen), ValueFormat("an address and a port, such as 127.0.0.1:3080")
]
ListenAddressAnyPort = Annotated[
    str,
    AfterValidator(_validate_listen_any_port),
    ValueFormat("an address and a port, such as 127.0.0.1:18000"),
]
EnvoyListenAddress = Annotated[
    str, AfterValidator(_validate_envoy_listen), ValueFormat("an IP address and a port, such as 0.0.0.0:6000")
]
PdUrl = Annotated[str, AfterValidator(_validate_pd_url), ValueFormat("a URL, such as http://10.0.0.1:2379")]
File = Annotated[Path, ValueFormat("the path of a file")]
Directory = Annotated[Path, ValueFormat("the path of a directory")]


class SettingsSection(BaseModel):
    """A group of settings. Unknown keys are rejected, and a key without a value means its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # A section stays valid when all of its settings are commented out.
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    @field_validator("*", mode="before")
    @classmethod
    def _reject_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1, and the empty path as the working directory.
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise SettingError(f"{str(value).lower()} is not a number")
        if value == "":
            raise SettingError("the text is empty")
        return value
