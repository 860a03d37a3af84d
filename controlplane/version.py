"""The version of this control plane, and which versions of the Envoy module are compatible with it."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("tidevoy")


def is_compatible(module_version: str) -> bool:
    """Whether a module of that version supports this control plane's configuration: same major and minor."""
    return module_version.split(".")[:2] == VERSION.split(".")[:2]
