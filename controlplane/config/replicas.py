"""Settings of replicas: several control planes that share their state in PD."""

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
    if (
        not value
        or len(value) > _MAX_NAME_LENGTH
        or not all(_is_name_character(character) for character in value)
    ):
        raise SettingError(f"{value!r} is not a valid replica name")
    return value


def _is_name_character(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in "._-")


def _validate_key_prefix(value: str) -> str:
    inner = value[1:-1]
    if not (value.startswith("/") and value.endswith("/") and inner) or "//" in value or not value.isascii():
        raise SettingError(f"{value!r} is not a valid key prefix")
    if value.startswith(("/topology/", "/keyspaces/", "/tidb/", "/pd/")):
        raise SettingError(f"{value!r} belongs to TiDB or PD", "choose an unused prefix, such as /tidevoy/")
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
    """Several control planes on the same PD (`docs/operate/replicas.md`). All have the same settings except
    addresses, names and directories.
    """

    enabled: bool = setting(
        False,
        "Whether this control plane shares intents, rollouts and the plan with other replicas in PD's etcd.",
        "restart",
    )
    name: ReplicaName | None = setting(
        None, "Unique name of this replica. Default: the host name.", "restart"
    )
    advertise: Address | None = setting(
        None, "Address at which other replicas reach xds.listen. Default: xds.listen itself.", "restart"
    )
    prefix: KeyPrefix = setting("/tidevoy/", "Prefix of all keys.", "restart")
    lease: int = setting(
        5,
        "Seconds without contact after which a replica counts as lost, and another one becomes leader. PD"
        " grants no shorter lease.",
        "restart",
        unit="seconds",
        ge=5,
        le=60,
    )

    @property
    def effective_name(self) -> str:
        """The configured name, or the host name with invalid characters replaced."""
        if self.name is not None:
            return self.name
        host_name = "".join(
            character if _is_name_character(character) else "-" for character in socket.gethostname()
        )
        return host_name[:_MAX_NAME_LENGTH] or "tidevoy"

    def advertised_address(self, listen: str, port: int) -> str:
        """Return the address for other replicas if the xDS server listens on `listen` with that port."""
        return self.advertise or addresses.join(listen.rpartition(":")[0].strip("[]"), port)

    def check_usable(self, *, listen: str, has_pd: bool, requires_client_certs: bool | None) -> None:
        """Raise SettingError if replicas are enabled and cannot work.

        `requires_client_certs`: whether the xDS server requires client certificates; None: it has no TLS.
        """
        if not self.enabled:
            return
        if not has_pd:
            raise SettingError(
                "is true, but there is no PD to share the state in", "set pd.urls", key="replicas.enabled"
            )
        if self.advertise is None and _is_wildcard_address(listen):
            raise SettingError(
                f"is not set, and other replicas cannot connect to {listen}",
                "write the address at which they reach this replica",
                key="replicas.advertise",
            )
        if requires_client_certs is False:
            raise SettingError(
                "is not set, but replicas authenticate to each other by client certificates",
                "set it",
                key="xds.tls.client_ca",
            )


def _is_wildcard_address(listen: str) -> bool:
    ip = literal_host(listen)
    return ip is not None and ipaddress.ip_address(ip).is_unspecified
