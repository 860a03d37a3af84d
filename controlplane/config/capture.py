"""Settings of captures of the traffic of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from controlplane.config.types import SettingsSection, ValueFormat, setting, validate_envoy_path

EnvoyDirectory = Annotated[
    Path, AfterValidator(validate_envoy_path), ValueFormat("the absolute path of a directory")
]


class CaptureSettings(SettingsSection):
    """Captures of the traffic of clients (module only), which `tidevoy traffic capture` starts and stops."""

    directory: EnvoyDirectory | None = setting(None)
    """Directory on the machines of the Envoys, in which each capture gets a directory; default: captures are
    off. Files hold the texts of statements with their values. Removing it ends a capture; another change
    applies to the next one."""
    max_bytes: int = setting(10 << 30, unit="bytes", ge=0, le=1 << 50)
    """Size of all files of one Envoy process at which it ends its capture; 0: unlimited. It applies to the
    next capture."""
