"""Settings of groups of nodes, zones, and backup nodes."""

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
        raise SettingError(f"{value!r} is not a valid group name")
    return value


def _validate_selector(value: dict[str, str]) -> dict[str, str]:
    if not value:
        raise SettingError("has no labels, so every node would be in the group")
    return value


GroupName = Annotated[
    str,
    AfterValidator(_validate_group_name),
    ValueFormat("up to 32 lower-case letters, digits and hyphens, such as olap"),
]
Selector = Annotated[
    dict[str, str],
    AfterValidator(_validate_selector),
    ValueFormat("a mapping of at least one label to its value"),
]


class GroupSettings(SettingsSection):
    """A separate port on every Envoy that serves only nodes with all of these labels.

    A node belongs to the first group that it matches; nodes that match none are served by `sql.listen`.
    Running Envoys get new groups; a listener that an Envoy already has is not changed.
    """

    name: GroupName = required(
        "Name of the group; an Envoy can be started for this group alone (`tidevoy bootstrap --group`).",
        "new envoys",
    )
    listen: EnvoyListenAddress = required(
        "Address on which each Envoy listens for clients of the group.", "new envoys"
    )
    labels: Selector = required("Labels that a node of the group must have, all of them.", "now")


class ZoneSettings(SettingsSection):
    """How an Envoy prefers nodes of its own zone, which its bootstrap names (`tidevoy bootstrap --zone`)."""

    label: str = setting("zone", "Node label that holds the node's zone.", "now")
    overload_ratio: float = setting(
        1.5,
        "When the nodes of a zone have this many times the average load of their group, the Envoys of that"
        " zone also use nodes of other zones (policy `resource` only).",
        "now",
        ge=1.1,
        le=100,
    )


class BackupSettings(SettingsSection):
    """Nodes that serve only while no other node of their group does."""

    labels: dict[str, str] = setting(
        {}, "Labels that mark a node as backup, all of them; empty: there are no backup nodes.", "now"
    )
