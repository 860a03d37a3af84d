"""Envoys of one class get the same bytes: what tells them apart is their MySQL filter, group and zone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from controlplane.version import VERSION, fits

# Registered name of contrib's filter, as `Node.extensions` lists it on builds that have it.
CONTRIB_FILTER = "envoy.filters.network.mysql_proxy"
# Key of `Node.metadata` under which an Envoy's bootstrap says which version of the module it loads.
MODULE_METADATA = "tidevoy.module"
# The same for the only group that an Envoy is there for.
GROUP_METADATA = "tidevoy.group"

Filter = Literal["auto", "module", "contrib", "none"]  # the setting `xds.filter`


@dataclass(frozen=True, slots=True)
class EnvoyClass:
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

    def at(self, group: str, zone: str) -> EnvoyClass:
        """The same for Envoys of that group and zone."""
        return replace(self, group=group, zone=zone)


MODULE = EnvoyClass("module")
CONTRIB = EnvoyClass("contrib")
PLAIN = EnvoyClass("none")
CLASSES = (MODULE, CONTRIB, PLAIN)


@dataclass(frozen=True, slots=True)
class Build:
    """What an Envoy says that it has: contrib's filter, and the module's version (empty: no module)."""

    contrib: bool = False
    module: str = ""


def candidates(wanted: Filter, build: Build) -> tuple[EnvoyClass, ...]:
    """The classes that an Envoy may be of, best first. The last of them has nothing to refuse."""
    unfit = build.module and not fits(build.module)
    module = wanted == "module" or (wanted == "auto" and build.module)
    contrib = wanted == "contrib" or (wanted in ("auto", "module") and build.contrib)
    able = ((MODULE, module and not unfit), (CONTRIB, contrib), (PLAIN, True))
    return tuple(envoy_class for envoy_class, may in able if may)


def lacks_module(build: Build) -> str:
    """Why an Envoy cannot be of the class `module`, as a clause; empty when it may be."""
    if not build.module:
        return "it does not say that it has Tidevoy's module (`tidevoy bootstrap --module`)"
    if not fits(build.module):
        needed = ".".join(VERSION.split(".")[:2])
        return f"its module is version {build.module} and this control plane needs {needed}.x"
    return ""
