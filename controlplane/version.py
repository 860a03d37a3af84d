"""The version of this control plane, which the module in Envoy has to fit."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("tidevoy")


def is_compatible(module_version: str) -> bool:
    """Whether a module of that version does what this control plane configures: major and minor are equal."""
    return module_version.split(".")[:2] == VERSION.split(".")[:2]
