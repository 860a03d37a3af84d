"""Which nodes serve whom: groups of nodes, zones, and nodes that only stand in for others."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from controlplane.config.types import (
    EnvoyListenAddress,
    SettingError,
    SettingsSection,
    ValueFormat,
    required,
    setting,
)

_GROUP_NAME = re.compile(r"[a-z0-9-]{1,32}")


def _validate_group_name(value: str) -> str:
    if _GROUP_NAME.fullmatch(value) is None:
        raise SettingError(f"{value!r} is no name of a group")
    return value


def _validate_selector(value: dict[str, str]) -> dict[str, str]:
    if not value:
        raise SettingError("names no label, so every node would be in the group")
    return value


GroupName = Annotated[
    str,
    AfterValidator(_validate_group_name),
    ValueFormat("up to 32 small letters, digits and hyphens, such as olap"),
]
Selector = Annotated[
    dict[str, str],
    AfterValidator(_validate_selector),
    ValueFormat("a mapping of at least one label to its value"),
]


class GroupSettings(SettingsSection):
    """A port of its own on every Envoy, which leads only to nodes that have all of these labels.

    A node is in the first group that it fits; one that fits none is led to by `sql.listen`. Envoys that run
    get a group that is new; a listener that an Envoy has is not changed.
    """

    name: GroupName = required("Its name, by which an Envoy can be given to it alone.", "new envoys")
    listen: EnvoyListenAddress = required(
        "Address on which each Envoy listens for clients of the group.", "new envoys"
    )
    labels: Selector = required("Labels that a node of the group has, all of them.", "now")


class ZoneSettings(SettingsSection):
    """How an Envoy prefers nodes near it; an Envoy says where it is (`tidevoy bootstrap --zone`)."""

    label: str = setting("zone", "The label of a node that says in which zone it is.", "now")
    spill: float = setting(
        1.5,
        "When the nodes of a zone have so many times the load of their whole group, the Envoys of that zone"
        " use nodes elsewhere, too (policy `resource` only).",
        "now",
        ge=1.1,
        le=100,
    )


class BackupSettings(SettingsSection):
    """Nodes that serve only while no other node of their group does."""

    labels: dict[str, str] = setting(
        {}, "Labels that such a node has, all of them; empty: there are none.", "now"
    )
