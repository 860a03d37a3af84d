"""The profile of an Envoy: MySQL filter, group, zone and switches of the module.

Envoys of one profile get equal resources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from controlplane.model.module_switches import NO_OVERRIDES, SwitchOverrides
from controlplane.model.plan import Plan
from controlplane.version import VERSION, is_compatible

# The MySQL filter of Envoy's contrib builds, as named in `Node.extensions`.
CONTRIB_FILTER = "envoy.filters.network.mysql_proxy"
# Key of `Node.metadata` with the version of the module that the Envoy's bootstrap loads.
MODULE_METADATA_KEY = "tidevoy.module"
# Key of `Node.metadata` with the features of this module that earlier modules of its version lack.
FEATURES_METADATA_KEY = "tidevoy.module.features"
# The module applies settings while Envoy runs.
LIVE_SETTINGS_FEATURE = "live-settings"
# The module reports statistics of statements.
STATEMENTS_FEATURE = "statements"
# The module captures the traffic of clients.
CAPTURE_FEATURE = "capture"
MODULE_FEATURES = (LIVE_SETTINGS_FEATURE, STATEMENTS_FEATURE, CAPTURE_FEATURE)
# Key of `Node.metadata` with the only group that the Envoy serves.
GROUP_METADATA_KEY = "tidevoy.group"

FilterSetting = Literal["auto", "module", "contrib", "none"]  # the setting `xds.filter`


@dataclass(frozen=True, slots=True)
class EnvoyProfile:
    """The properties of an Envoy on which its resources depend, besides plan and settings."""

    filter: Literal["module", "contrib", "none"]
    group: str = ""  # the only group that the Envoy serves; empty if it serves all
    zone: str = ""  # the location of the Envoy; empty if it is unknown
    overrides: SwitchOverrides = NO_OVERRIDES
    features: frozenset[str] = frozenset()  # those of MODULE_FEATURES that the Envoy's module has
    capturing_envoy: str = ""  # the Envoy's id while it captures traffic, else empty: other Envoys share it

    @property
    def has_module(self) -> bool:
        """Whether the Envoy gets Tidevoy's module."""
        return self.filter == "module"

    @property
    def gets_settings_live(self) -> bool:
        """Whether the Envoy's listener leaves settings to the live configuration."""
        return self.has_module and LIVE_SETTINGS_FEATURE in self.features

    def for_group_and_zone(self, group: str, zone: str) -> EnvoyProfile:
        """Return this profile with another group and zone."""
        return replace(self, group=group, zone=zone)

    def for_envoy(self, envoy_node: EnvoyNode) -> EnvoyProfile:
        """Return this profile with the group, the zone and the features of an Envoy."""
        return replace(self, group=envoy_node.group, zone=envoy_node.zone, features=envoy_node.features)

    def for_plan(self, plan: Plan, envoy: str) -> EnvoyProfile:
        """Return this profile with what the plan has for an Envoy: switches, and whether it captures."""
        overrides = plan.switch_overrides.get(envoy, NO_OVERRIDES)
        captures = plan.capture is not None and plan.capture.applies_to(envoy)
        capturing_envoy = envoy if captures and CAPTURE_FEATURE in self.features else ""
        if (overrides, capturing_envoy) == (self.overrides, self.capturing_envoy):
            return self
        return replace(self, overrides=overrides, capturing_envoy=capturing_envoy)

    @property
    def for_all_plans(self) -> EnvoyProfile:
        """This profile without what only affects resources that depend on the plan."""
        return replace(self, zone="", overrides=NO_OVERRIDES, capturing_envoy="")


MODULE_PROFILE = EnvoyProfile("module")
CONTRIB_PROFILE = EnvoyProfile("contrib")
PLAIN_PROFILE = EnvoyProfile("none")
PROFILES = (MODULE_PROFILE, CONTRIB_PROFILE, PLAIN_PROFILE)


@dataclass(frozen=True, slots=True)
class EnvoyNode:
    """What an Envoy reports about itself in the field `node` of its first message."""

    id: str
    version: str
    has_contrib_filter: bool = False
    module_version: str = ""  # empty if the bootstrap loads no module
    group: str = ""  # the only group that the Envoy serves; empty if it serves all
    zone: str = ""  # the location of the Envoy; empty if it is unknown
    features: frozenset[str] = frozenset()  # those of MODULE_FEATURES that its module has


def candidate_profiles(filter_setting: FilterSetting, envoy_node: EnvoyNode) -> tuple[EnvoyProfile, ...]:
    """Return the profiles that an Envoy may get, best first. The last one is always `PLAIN_PROFILE`."""
    incompatible = envoy_node.module_version and not is_compatible(envoy_node.module_version)
    module = filter_setting == "module" or (filter_setting == "auto" and envoy_node.module_version)
    contrib = filter_setting == "contrib" or (
        filter_setting in ("auto", "module") and envoy_node.has_contrib_filter
    )
    options = (
        (MODULE_PROFILE, module and not incompatible),
        (CONTRIB_PROFILE, contrib),
        (PLAIN_PROFILE, True),
    )
    return tuple(profile for profile, is_allowed in options if is_allowed)


def module_problem(envoy_node: EnvoyNode) -> str:
    """Return why an Envoy cannot have the module profile, as a clause; empty if it can."""
    if not envoy_node.module_version:
        return "its bootstrap does not name Tidevoy's module (`tidevoy bootstrap --module`)"
    if not is_compatible(envoy_node.module_version):
        needed = ".".join(VERSION.split(".")[:2])
        return f"its module is version {envoy_node.module_version} and this control plane needs {needed}.x"
    return ""
