"""Settings of replicas: several control planes that share their state in PD."""

from __future__ import annotations

import re
import socket
from typing import Annotated

from pydantic import AfterValidator, Field

from controlplane import address as addresses
from controlplane.config.types import (
    Address,
    SettingError,
    SettingsSection,
    ValueFormat,
    setting,
)

_MAX_NAME_LENGTH = 64


def _validate_key_prefix(value: str) -> str:
    if value.startswith(("/topology/", "/keyspaces/", "/tidb/", "/pd/")):
        raise SettingError(f"{value!r} belongs to TiDB or PD", "choose an unused prefix, such as /tidevoy/")
    return value


ReplicaName = Annotated[
    str,
    Field(pattern=rf"^[A-Za-z0-9._-]{{1,{_MAX_NAME_LENGTH}}}$"),
    ValueFormat("at most 64 letters, digits, `.`, `_` and `-`, such as balancer-1"),
]
KeyPrefix = Annotated[
    str,
    Field(pattern=r"^/([!-.0-~]+/)+$"),  # printable ASCII without empty segments
    AfterValidator(_validate_key_prefix),
    ValueFormat("a path that begins and ends with /: /tidevoy/"),
]


class ReplicaSettings(SettingsSection):
    """Several control planes on the same PD (`docs/operate/replicas.md`). All replicas must have the same
    settings, except addresses, names and directories.
    """

    enabled: bool = setting(False, takes_effect="restart")
    """Whether this control plane shares intents, rollouts and the plan with other replicas in PD's etcd."""
    name: ReplicaName | None = setting(None, takes_effect="restart")
    """Unique name of this replica. Default: the host name."""
    advertise: Address | None = setting(None, takes_effect="restart")
    """Address at which other replicas reach xds.listen. Default: xds.listen itself."""
    prefix: KeyPrefix = setting("/tidevoy/", takes_effect="restart")
    """Prefix of Tidevoy's keys in PD's etcd."""
    lease_ttl: int = setting(5, takes_effect="restart", unit="seconds", ge=5, le=60)
    """Seconds without contact to PD after which a replica counts as lost, and another one may become the
    leader. PD grants no lease below 5 s."""

    @property
    def effective_name(self) -> str:
        """The configured name, or the host name with invalid characters replaced."""
        if self.name is not None:
            return self.name
        return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_MAX_NAME_LENGTH] or "tidevoy"

    def advertised_address(self, listen: str, port: int) -> str:
        """Return the address for other replicas; `listen` is xds.listen, `port` is the bound port."""
        return self.advertise or addresses.join(listen.rpartition(":")[0].strip("[]"), port)
