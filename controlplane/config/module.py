"""Settings that switch parts of Tidevoy's module off."""

from __future__ import annotations

from typing import Literal

from controlplane.config.types import SettingsSection, setting
from controlplane.model.module_switches import ModuleSwitches


class ModuleSettings(SettingsSection):
    """For operators who suspect a part of the module: it is switched off in all Envoys, without a restart.

    `tidevoy envoys set` does the same for one Envoy, and takes precedence.
    """

    offload: Literal["on", "off"] = setting("on")
    """off: all bytes of all sessions go through Envoy's own events and buffers, which costs more CPU. Only
    while a session migrates does the module handle its events."""
    migration: Literal["on", "off"] = setting("on")
    """off: no session migrates. Drains wait for sessions to end, nothing is rebalanced, and the sessions of a
    node that fails end."""

    @property
    def switches(self) -> ModuleSwitches:
        """Which parts are on."""
        return ModuleSwitches(offload=self.offload == "on", migration=self.migration == "on")
