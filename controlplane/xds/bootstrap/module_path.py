"""Find Tidevoy's module for Envoy on this machine."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

MODULE_FILE_NAME = "libtidevoy.so"


# The module in the wheel, and the module built in the checkout.
_CANDIDATE_PATHS = (
    Path(str(files("controlplane").joinpath(MODULE_FILE_NAME))),
    Path(__file__).parents[3] / "filters" / "target" / "release" / MODULE_FILE_NAME,
)


def find_module() -> Path | None:
    """Return the path of the first module that exists; None if there is none."""
    return next((file.resolve() for file in _CANDIDATE_PATHS if file.is_file()), None)
