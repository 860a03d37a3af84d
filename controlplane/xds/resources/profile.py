"""The profile of an Envoy: MySQL filter, group and zone. Envoys of one profile get the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from controlplane.version import VERSION, is_compatible

# Registered name of contrib's filter, as `Node.extensions` lists it on builds that have it.
CONTRIB_FILTER = "envoy.filters.network.mysql_proxy"
# Key of `Node.metadata` in which an Envoy's bootstrap gives the version of the module that it loads.
MODULE_METADATA_KEY = "tidevoy.module"
# Key of `Node.metadata` for the only group that an Envoy serves.
GROUP_METADATA_KEY = "tidevoy.group"

FilterSetting = Literal["auto", "module", "contrib", "none"]  # the setting `xds.filter`


@dataclass(frozen=True, slots=True)
class EnvoyProfile:
    """What an Envoy's resources depend on besides plan and settings.

    `group`: the only group that it serves; empty: all. `zone`: its location; empty: unknown.
    """

    filter: Literal["module", "contrib", "none"]
    group: str = ""
    zone: str = ""

    @property
    def has_module(self) -> bool:
        """Whether the Envoy gets Tidevoy's module."""
        return self.filter == "module"

    def for_group_and_zone(self, group: str, zone: str) -> EnvoyProfile:
        """Return this profile with another group and zone."""
        return replace(self, group=group, zone=zone)


MODULE_PROFILE = EnvoyProfile("module")
CONTRIB_PROFILE = EnvoyProfile("contrib")
PLAIN_PROFILE = EnvoyProfile("none")
PROFILES = (MODULE_PROFILE, CONTRIB_PROFILE, PLAIN_PROFILE)


@dataclass(frozen=True, slots=True)
class EnvoyCapabilities:
    """What an Envoy reports to have: contrib's filter, and the module's version (empty: no module)."""

    has_contrib_filter: bool = False
    module_version: str = ""


def candidate_profiles(
    filter_setting: FilterSetting, capabilities: EnvoyCapabilities
) -> tuple[EnvoyProfile, ...]:
    """Return the profiles that fit an Envoy, best first. The last is plain and cannot be rejected."""
    incompatible = capabilities.module_version and not is_compatible(capabilities.module_version)
    module = filter_setting == "module" or (filter_setting == "auto" and capabilities.module_version)
    contrib = filter_setting == "contrib" or (
        filter_setting in ("auto", "module") and capabilities.has_contrib_filter
    )
    options = (
        (MODULE_PROFILE, module and not incompatible),
        (CONTRIB_PROFILE, contrib),
        (PLAIN_PROFILE, True),
    )
    return tuple(profile for profile, is_allowed in options if is_allowed)


def module_problem(capabilities: EnvoyCapabilities) -> str:
    """Return why an Envoy cannot have the module profile, as a clause; empty if it can."""
    if not capabilities.module_version:
        return "its bootstrap does not name Tidevoy's module (`tidevoy bootstrap --module`)"
    if not is_compatible(capabilities.module_version):
        needed = ".".join(VERSION.split(".")[:2])
        return f"its module is version {capabilities.module_version} and this control plane needs {needed}.x"
    return ""
