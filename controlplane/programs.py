"""Finds the programs in Rust that Tidevoy's wheel contains."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_IN_CHECKOUT = Path(__file__).parents[1] / "filters" / "target" / "release"


def find_program(name: str) -> Path | None:
    """Return a program beside this Python, on PATH, or of this checkout; None: it is not installed."""
    found = shutil.which(name)
    candidates = (
        Path(sys.executable).with_name(name),
        *([Path(found)] if found else []),
        _IN_CHECKOUT / name,
    )
    return next((file for file in candidates if file.is_file()), None)


def how_to_install(name: str) -> str:
    """Return what a user can do if a program is not installed."""
    return (
        "install Tidevoy's wheel for Linux, its Debian package or the image of the control plane, which"
        f" contain {name}, or build it in a checkout, with `cargo build --release` in filters/"
    )
