"""Where Tidevoy's module for Envoy is on this machine."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

MODULE_FILE_NAME = "libtidevoy.so"


# Packed into the wheel, or built in the checkout.
_CANDIDATE_PATHS = (
    Path(str(files("controlplane").joinpath(MODULE_FILE_NAME))),
    Path(__file__).parents[3] / "filters" / "target" / "release" / MODULE_FILE_NAME,
)


def find_module() -> Path | None:
    """The module that came with this package, else the one that was built in the checkout; None: neither."""
    return next((file.resolve() for file in _CANDIDATE_PATHS if file.is_file()), None)
