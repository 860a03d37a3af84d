"""Switches of Tidevoy's module that operators set: parts of it, readiness, and drains. Pure data."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ModuleSwitches:
    """Which parts of the module are on."""

    offload: bool = True
    migration: bool = True

    def without(self, parts: Set[str]) -> ModuleSwitches:
        """Return these switches with some parts switched off."""
        return ModuleSwitches(*(getattr(self, name) and name not in parts for name in SWITCHES))


SWITCHES = tuple(field.name for field in fields(ModuleSwitches))


@dataclass(frozen=True, slots=True)
class SwitchOverrides:
    """What an operator has set for one Envoy; None: the settings apply."""

    offload: bool | None = None
    migration: bool | None = None
    ready: bool | None = None
    """False: the Envoy tells load balancers that it is not ready for new clients. No setting does this."""
    drain: bool | None = None
    """True: the Envoy drains: it is not ready, then refuses new clients and ends its sessions."""

    @property
    def is_ready(self) -> bool:
        """Whether load balancers may send new clients to the Envoy, as far as `ready` says."""
        return self.ready is not False

    @property
    def is_drain_requested(self) -> bool:
        """Whether the Envoy has to drain, or has drained."""
        return self.drain is True

    def apply_to(self, settings: ModuleSwitches) -> ModuleSwitches:
        """Return the switches that the control plane publishes for the Envoy."""
        return ModuleSwitches(
            offload=settings.offload if self.offload is None else self.offload,
            migration=settings.migration if self.migration is None else self.migration,
        )


ALL_ON, NO_OVERRIDES = ModuleSwitches(), SwitchOverrides()
