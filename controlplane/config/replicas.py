"""Several control planes that share one state in PD."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated

from pydantic import AfterValidator

from controlplane import address as addresses
from controlplane.config.types import Address, Form, Section, Wrong, literal_host, setting

_LONGEST_NAME = 64


def _name(value: str) -> str:
    if not value or len(value) > _LONGEST_NAME or not all(_is_plain(letter) for letter in value):
        raise Wrong(f"{value!r} is no name of a replica")
    return value


def _is_plain(letter: str) -> bool:
    return letter.isascii() and (letter.isalnum() or letter in "._-")


def _prefix(value: str) -> str:
    inner = value[1:-1]
    if not (value.startswith("/") and value.endswith("/") and inner) or "//" in value or not value.isascii():
        raise Wrong(f"{value!r} is no prefix of keys")
    if value.startswith(("/topology/", "/keyspaces/", "/tidb/", "/pd/")):
        raise Wrong(f"{value!r} belongs to TiDB or PD", "choose a prefix that nobody else uses, /tidevoy/")
    return value


Name = Annotated[
    str, AfterValidator(_name), Form("at most 64 letters, digits, `.`, `_` and `-`, such as balancer-1")
]
Prefix = Annotated[str, AfterValidator(_prefix), Form("a path that begins and ends with /: /tidevoy/")]


class Replicas(Section):
    """Control planes beside this one, on the same PD (`docs/operate/replicas.md`). All have the same settings but for
    addresses, names and directories.
    """

    enabled: bool = setting(
        False, "Whether intents, rollouts and the plan are shared with others, in PD's etcd.", "restart"
    )
    name: Name | None = setting(
        None, "What this one is called; each has a name of its own. Default: the host name.", "restart"
    )
    advertise: Address | None = setting(
        None, "Address at which other replicas reach xds.listen. Default: xds.listen itself.", "restart"
    )
    prefix: Prefix = setting("/tidevoy/", "What all keys begin with.", "restart")
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
    def own_name(self) -> str:
        """The name, or the host name as far as it can be one."""
        if self.name is not None:
            return self.name
        plain = "".join(letter if _is_plain(letter) else "-" for letter in socket.gethostname())
        return plain[:_LONGEST_NAME] or "tidevoy"

    def advertised(self, listen: str, port: int) -> str:
        """The address that others are told, when the xDS server listens on `listen` and has that port."""
        return self.advertise or addresses.join(listen.rpartition(":")[0].strip("[]"), port)

    def check(self, *, listen: str, has_pd: bool, asks: bool | None) -> None:
        """Wrong when it is enabled and cannot work.

        `asks`: whether the xDS server asks its clients for certificates; None: it has no TLS.
        """
        if not self.enabled:
            return
        if not has_pd:
            raise Wrong(
                "is true, but there is no PD to share a state in", "set pd.urls", key="replicas.enabled"
            )
        if self.advertise is None and _is_unspecific(listen):
            raise Wrong(
                f"is not set, and other replicas cannot connect to {listen}",
                "write the address at which they reach this one",
                key="replicas.advertise",
            )
        if asks is False:
            raise Wrong(
                "is not set, but replicas that connect to each other have to show certificates",
                "set it",
                key="xds.tls.client_ca",
            )


def _is_unspecific(listen: str) -> bool:
    ip = literal_host(listen)
    return ip is not None and ipaddress.ip_address(ip).is_unspecified
