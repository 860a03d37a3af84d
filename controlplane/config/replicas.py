"""Several control planes that share one state in PD."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated

from pydantic import AfterValidator

from controlplane import address as addresses
from controlplane.config.types import (
    Address,
    SettingError,
    SettingsSection,
    ValueFormat,
    literal_host,
    setting,
)

_MAX_NAME_LENGTH = 64


def _validate_replica_name(value: str) -> str:
    if not value or len(value) > _MAX_NAME_LENGTH or not all(_is_name_character(letter) for letter in value):
        raise SettingError(f"{value!r} is no name of a replica")
    return value


def _is_name_character(letter: str) -> bool:
    return letter.isascii() and (letter.isalnum() or letter in "._-")


def _validate_key_prefix(value: str) -> str:
    inner = value[1:-1]
    if not (value.startswith("/") and value.endswith("/") and inner) or "//" in value or not value.isascii():
        raise SettingError(f"{value!r} is no prefix of keys")
    if value.startswith(("/topology/", "/keyspaces/", "/tidb/", "/pd/")):
        raise SettingError(
            f"{value!r} belongs to TiDB or PD", "choose a prefix that nobody else uses, /tidevoy/"
        )
    return value


ReplicaName = Annotated[
    str,
    AfterValidator(_validate_replica_name),
    ValueFormat("at most 64 letters, digits, `.`, `_` and `-`, such as balancer-1"),
]
KeyPrefix = Annotated[
    str, AfterValidator(_validate_key_prefix), ValueFormat("a path that begins and ends with /: /tidevoy/")
]


class ReplicaSettings(SettingsSection):
    """Control planes beside this one, on the same PD (`docs/operate/replicas.md`). All have the same settings but for
    addresses, names and directories.
    """

    enabled: bool = setting(
        False, "Whether intents, rollouts and the plan are shared with others, in PD's etcd.", "restart"
    )
    name: ReplicaName | None = setting(
        None, "What this one is called; each has a name of its own. Default: the host name.", "restart"
    )
    advertise: Address | None = setting(
        None, "Address at which other replicas reach xds.listen. Default: xds.listen itself.", "restart"
    )
    prefix: KeyPrefix = setting("/tidevoy/", "What all keys begin with.", "restart")
    lease: int = setting(
        5,
        "Seconds after which a replica that is not heard of has left, and another one leads. PD grants no"
        " shorter ones.",
        "restart",
        unit="seconds",
        ge=5,
        le=60,
    )

    @property
    def effective_name(self) -> str:
        """The name, or the host name as far as it can be one."""
        if self.name is not None:
            return self.name
        plain = "".join(letter if _is_name_character(letter) else "-" for letter in socket.gethostname())
        return plain[:_MAX_NAME_LENGTH] or "tidevoy"

    def advertised_address(self, listen: str, port: int) -> str:
        """The address that others are told, when the xDS server listens on `listen` and has that port."""
        return self.advertise or addresses.join(listen.rpartition(":")[0].strip("[]"), port)

    def check_usable(self, *, listen: str, has_pd: bool, requires_client_certs: bool | None) -> None:
        """Wrong when it is enabled and cannot work.

        `asks`: whether the xDS server asks its clients for certificates; None: it has no TLS.
        """
        if not self.enabled:
            return
        if not has_pd:
            raise SettingError(
                "is true, but there is no PD to share a state in", "set pd.urls", key="replicas.enabled"
            )
        if self.advertise is None and _is_wildcard_address(listen):
            raise SettingError(
                f"is not set, and other replicas cannot connect to {listen}",
                "write the address at which they reach this one",
                key="replicas.advertise",
            )
        if requires_client_certs is False:
            raise SettingError(
                "is not set, but replicas that connect to each other have to show certificates",
                "set it",
                key="xds.tls.client_ca",
            )


def _is_wildcard_address(listen: str) -> bool:
    ip = literal_host(listen)
    return ip is not None and ipaddress.ip_address(ip).is_unspecified
