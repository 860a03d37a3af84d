"""Envoys of one class get the same bytes: what tells them apart is their MySQL filter, group and zone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from controlplane.version import VERSION, is_compatible

# Registered name of contrib's filter, as `Node.extensions` lists it on builds that have it.
CONTRIB_FILTER = "envoy.filters.network.mysql_proxy"
# Key of `Node.metadata` under which an Envoy's bootstrap says which version of the module it loads.
MODULE_METADATA_KEY = "tidevoy.module"
# The same for the only group that an Envoy is there for.
GROUP_METADATA_KEY = "tidevoy.group"

FilterSetting = Literal["auto", "module", "contrib", "none"]  # the setting `xds.filter`


@dataclass(frozen=True, slots=True)
class EnvoyProfile:
    """What an Envoy's resources depend on beside plan and settings.

    `group`: the only one that it serves; empty: all. `zone`: where it is; empty: not known.
    """

    filter: Literal["module", "contrib", "none"]
    group: str = ""
    zone: str = ""

    @property
    def has_module(self) -> bool:
        """Whether it gets Tidevoy's module."""
        return self.filter == "module"

    def for_group_and_zone(self, group: str, zone: str) -> EnvoyProfile:
        """The same for Envoys of that group and zone."""
        return replace(self, group=group, zone=zone)


MODULE_PROFILE = EnvoyProfile("module")
CONTRIB_PROFILE = EnvoyProfile("contrib")
PLAIN_PROFILE = EnvoyProfile("none")
PROFILES = (MODULE_PROFILE, CONTRIB_PROFILE, PLAIN_PROFILE)


@dataclass(frozen=True, slots=True)
class EnvoyCapabilities:
    """What an Envoy says that it has: contrib's filter, and the module's version (empty: no module)."""

    has_contrib_filter: bool = False
    module_version: str = ""


def candidate_profiles(
    filter_setting: FilterSetting, capabilities: EnvoyCapabilities
) -> tuple[EnvoyProfile, ...]:
    """The classes that an Envoy may be of, best first. The last of them has nothing to refuse."""
    unfit = capabilities.module_version and not is_compatible(capabilities.module_version)
    module = filter_setting == "module" or (filter_setting == "auto" and capabilities.module_version)
    contrib = filter_setting == "contrib" or (
        filter_setting in ("auto", "module") and capabilities.has_contrib_filter
    )
    options = ((MODULE_PROFILE, module and not unfit), (CONTRIB_PROFILE, contrib), (PLAIN_PROFILE, True))
    return tuple(envoy_class for envoy_class, is_allowed in options if is_allowed)


def module_problem(capabilities: EnvoyCapabilities) -> str:
    """Why an Envoy cannot be of the class `module`, as a clause; empty when it may be."""
    if not capabilities.module_version:
        return "it does not say that it has Tidevoy's module (`tidevoy bootstrap --module`)"
    if not is_compatible(capabilities.module_version):
        needed = ".".join(VERSION.split(".")[:2])
        return f"its module is version {capabilities.module_version} and this control plane needs {needed}.x"
    return ""
